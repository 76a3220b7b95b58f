"""A tensor's bytes as they are now, without a copy, where the tensor is on the CPU.

torch can share the memory of a storage between two of them until one is written to, which then gets a copy of its own:
what torch calls a lazy clone (c10/core/impl/COW.h). Whoever changes, resizes or drops the tensor later, by whatever
way through torch, leaves these bytes alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import torch

_address_of: Callable[[torch.Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]  # of the storage
_view_at: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_view_at.restype = ctypes.py_object
_view_at.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_READ = 0x100  # PyBUF_READ


def snapshot(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a tensor that has all of its storage, (nbytes,) uint8, for `view_of`.

    Returns
    -------
    Tensor : None where somebody may have the memory beside torch (NumPy, another process), who would not see what is
        written to the tensor from then on
    """
    storage: Any = tensor.untyped_storage()
    nbytes = tensor.nbytes
    if nbytes != storage.nbytes() or not storage.resizable() or storage.is_shared():
        return None
    lazy: Any = tensor.detach()._lazy_clone()
    memory: Any = torch.empty(0, dtype=torch.uint8)
    return cast("torch.Tensor", memory.set_(lazy.untyped_storage(), 0, (nbytes,), (1,)))


def view_of(memory: torch.Tensor) -> memoryview:
    """The bytes of a 1-d uint8 tensor, to read, for as long as somebody holds it. torch's own ways to them may copy."""
    return cast("memoryview", _view_at(address_of(memory), memory.numel(), _READ))


def address_of(tensor: torch.Tensor) -> int:
    """Where the bytes of a tensor begin."""
    return _address_of(tensor) + int(tensor.storage_offset()) * tensor.itemsize
