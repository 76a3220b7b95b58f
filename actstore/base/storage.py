"""Weak references to storages, as plain integers.

An address does not identify a storage: once the storage is freed, another one may have it. A weak reference keeps the
address (not the memory) from being used again, and so makes it an identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from actstore.base.reaper import Finalizer

_untyped: Any = UntypedStorage  # torch's annotations miss these methods
_PLAIN: frozenset[type] = frozenset({Tensor, Parameter})  # no wrappers, as their subclasses may be
_is_wrapper: Callable[[Any], bool] = is_traceable_wrapper_subclass

hold_weak: Callable[[UntypedStorage], int] = _untyped._weak_ref  # the address, until `free_weak` is called with it
free_weak: Callable[[int], None] = _untyped._free_weak_ref
expired: Callable[[int], bool] = _untyped._expired


class SharedStorage(NamedTuple):
    """A storage that several modules save.

    Attributes
    ----------
    savers : name of each module, in order, and whether it is an input of a recomputed region there
    holder : name of the module whose handle keeps it; None where no handle does
    """

    nbytes: int
    savers: list[tuple[str, bool]]
    holder: str | None


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


def without_memory(tensor: Tensor) -> Tensor:
    """Return an alias that has the tensor's version counter, dtype and device, and none of its memory."""
    alias = tensor.detach()
    alias.data = tensor.new_empty(0)
    return alias


class FleetingTensor:
    """A dense tensor that can be made again for as long as its memory lives, which this object does not hold."""

    __slots__ = ("_key", "_last", "_version", "_witness")

    def __init__(self, tensor: Tensor) -> None:
        self._key = hold_weak(tensor.untyped_storage())
        self._last = Finalizer(free_weak, self._key)
        self._witness = without_memory(tensor)
        self._version = tensor._version

    def again(self) -> Tensor | None:
        """Return another tensor over all of the memory, with the same version counter; None where it is gone."""
        storage = revive(self._key)
        if storage is None:
            return None
        tensor = self._witness.detach()
        tensor.data = whole_of(storage, self._witness.dtype)
        return tensor

    def is_changed(self) -> bool:
        """Return whether the memory has been written to."""
        return self._witness._version != self._version


def whole_of(storage: UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """View all of a storage as a 1-d tensor."""
    empty: Any = torch.empty(0, dtype=dtype, device=storage.device)
    return cast("torch.Tensor", empty.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,)))
