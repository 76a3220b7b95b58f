"""Weak references to storages, as plain integers.

An address is no identity: once its storage is freed, another one may have it. A weak reference keeps the address (not
the memory) from being used again, and so makes it one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import UntypedStorage

_untyped: Any = UntypedStorage  # torch's annotations miss these methods

hold_weak: Callable[[UntypedStorage], int] = _untyped._weak_ref  # the address, until `free_weak` is called with it
free_weak: Callable[[int], None] = _untyped._free_weak_ref
expired: Callable[[int], bool] = _untyped._expired


def revive(key: int) -> UntypedStorage | None:
    """The storage of a weak reference, if it still lives."""
    return cast("UntypedStorage | None", _untyped._new_with_weak_ptr(key))


def whole_of(storage: UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """All of a storage as a 1-d tensor."""
    empty: Any = torch.empty(0, dtype=dtype, device=storage.device)
    return cast("torch.Tensor", empty.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,)))
