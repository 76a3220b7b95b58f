"""Calls of operators from a mode's handler, which return what they return without the mode.

PyTorch runs a handler with all keys above Python's excluded. What an operator's kernel calls then runs without
autocast, and takes conjugated views for plain tensors: `torch.linalg.pinv` of complex numbers is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_include_set, _exclude_set = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set

_LAZY = DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor
_AUTOCAST = tuple(key for name, key in DispatchKey.__members__.items() if name.startswith("Autocast"))
_COMPOSITE = "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"
# Operators of PyTorch whose kernels call some that autocast casts for, and the operator that calls them.
_CALLERS = {"aten::_trilinear": "aten::bilinear", "aten::linalg_pinv": "aten::pinverse"}


def redispatch(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator from the handler of a mode; what its kernel calls runs as without the mode."""
    keys = _restored(operator)
    if keys is None:
        return operator(*args, **kwargs)
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # the state around the outermost operator
        keys = keys - _exclude_set()
    with torch._C._ForceDispatchKeyGuard(_include_set(), _exclude_set() - keys):
        return operator(*args, **kwargs)


@cache
def _restored(operator: Any) -> DispatchKeySet | None:
    """Return the keys that the kernel of an operator may need; None for a kernel that calls no operators."""
    if not isinstance(operator, OpOverload):
        return None
    name, keys = operator.name(), [*_LAZY]
    if operator.namespace not in ("aten", "prim", "prims"):
        keys += [key for key in _AUTOCAST if not _has_kernel(name, key.name)]
    elif not any(_has_kernel(name, key) for key in _COMPOSITE) or _has_kernel(name, "CPU"):
        return None
    elif caller := _CALLERS.get(operator._schema.name):  # autocast is off inside of an operator that it casts for
        keys += [key for key in _AUTOCAST if not _has_kernel(caller, key.name)]
    return _set_of(keys)


def _set_of(keys: Iterable[DispatchKey]) -> DispatchKeySet:
    return reduce(or_, map(DispatchKeySet, keys))
