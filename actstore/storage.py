"""Weak references to storages, as plain integers.

An address is no identity: once its storage is freed, another one may have it. A weak reference keeps the address (not
the memory) from being used again, and so makes it one.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, cast

import torch
from torch import UntypedStorage
from torch._C._autograd import _unsafe_set_version_counter as _set_version

_untyped: Any = UntypedStorage  # torch's annotations miss these methods

hold_weak: Callable[[UntypedStorage], int] = _untyped._weak_ref  # the address, until `free_weak` is called with it
free_weak: Callable[[int], None] = _untyped._free_weak_ref
expired: Callable[[int], bool] = _untyped._expired


_probing = Lock()


def same_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share one version counter, so that equal versions mean equal values.

    Tensors over one storage need not: ``x.data``, `unsafe_chunk` and `set_` start counters of their own. There is no
    way to ask, so one counter is moved for a moment. Who sees a version that should not be calls `settled_version`.
    """
    with _probing:
        version = a._version
        if b._version != version:
            return False
        _set_version((a,), (version + 1,))
        try:
            return b._version != version
        finally:
            _set_version((a,), (version,))


def settled_version(tensor: torch.Tensor) -> int:
    """The version of `tensor` while nobody probes its counter."""
    with _probing:
        return tensor._version


def revive(key: int) -> UntypedStorage | None:
    """The storage of a weak reference, if it still lives."""
    return cast("UntypedStorage | None", _untyped._new_with_weak_ptr(key))


def whole_of(storage: UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """All of a storage as a 1-d tensor."""
    empty: Any = torch.empty(0, dtype=dtype, device=storage.device)
    return cast("torch.Tensor", empty.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,)))
