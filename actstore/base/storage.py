"""Weak references to storages, as plain integers.

An address does not identify a storage: once the storage is freed, another one may have it. A weak reference keeps the
address (not the memory) from being used again, and so makes it an identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_untyped: Any = UntypedStorage  # torch's annotations miss these methods
_PLAIN: frozenset[type] = frozenset({Tensor, Parameter})  # no wrappers, as their subclasses may be
_is_wrapper: Callable[[Any], bool] = is_traceable_wrapper_subclass

hold_weak: Callable[[UntypedStorage], int] = _untyped._weak_ref  # the address, until `free_weak` is called with it
free_weak: Callable[[int], None] = _untyped._free_weak_ref
expired: Callable[[int], bool] = _untyped._expired


def revive(key: int) -> UntypedStorage | None:
    """Return the storage of a weak reference; None where it was freed."""
    return cast("UntypedStorage | None", _untyped._new_with_weak_ptr(key))


def storages_of(tensor: Tensor) -> Sequence[UntypedStorage]:
    """Return the storages under a tensor of any class: none for a sparse one, those of its parts for a wrapper."""
    if tensor.__class__ not in _PLAIN and _is_wrapper(tensor):
        wrapper: Any = tensor
        parts = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
        return [storage for part in parts if isinstance(part, Tensor) for storage in storages_of(part)]
    try:
        return (tensor.untyped_storage(),)
    except (NotImplementedError, RuntimeError):
        return ()


def whole_of(storage: UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """View all of a storage as a 1-d tensor."""
    empty: Any = torch.empty(0, dtype=dtype, device=storage.device)
    return cast("torch.Tensor", empty.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,)))
