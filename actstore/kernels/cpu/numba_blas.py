"""numba's check for scipy's BLAS, deferred: it takes half of the time to load a kernel, and 16 MiB."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any


def defer() -> None:
    """Import numba's functions of arrays, but not scipy.linalg: no kernel multiplies matrices.

    numba asks for BLAS again where a function of the user's calls ``np.dot``, and imports scipy.linalg then.
    """
    from numba.np import linalg

    module: Any = linalg
    if "numba.np.arraymath" in sys.modules or find_spec("scipy") is None:
        return
    check, module.ensure_blas = module.ensure_blas, _nothing
    try:
        from numba.np import arraymath
    finally:
        module.ensure_blas = check
    other: Any = arraymath
    other.ensure_blas = check


def _nothing() -> None:
    """Check nothing, while numba is imported."""
