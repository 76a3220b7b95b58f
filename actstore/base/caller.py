"""The caller of this package, for warnings."""

from __future__ import annotations

import sys


def stacklevel() -> int:
    """Return the `stacklevel` with which a warning of the calling function names the first line outside of actstore."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] == "actstore":
        frame, level = frame.f_back, level + 1
    return level
