"""Modes of a compiler that traces."""

from __future__ import annotations

import torch
from torch._C import _get_dispatch_mode

_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def is_traced() -> bool:
    """Return whether a compiler's mode is active, whose tensors have no values."""
    return any(_get_dispatch_mode(mode) is not None for mode in _TRACING)
