"""Fetched bytes that serve as a tensor's own memory, without a copy, where the compute device is a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch

from actstore.base.reaper import Finalizer
from actstore.base.storage import free_weak, hold_weak, revive, whole_of

P = TypeVar("P")  # the owner of the bytes: Parcel


class Loan(Generic[P]):
    """The buffer of a parcel while tensors have it as their memory. Not thread-safe.

    Code may write to the tensors, as to any tensor that autograd unpacks. Their shared version counter reveals it.

    Attributes
    ----------
    parcel : owner of the bytes; None once a write has changed them
    users : number of users of the parcel that these tensors stand for
    """

    __slots__ = ("_key", "_last", "_version", "_witness", "parcel", "users")

    def __init__(self, parcel: P, tensor: torch.Tensor) -> None:
        self.parcel: P | None = parcel
        self.users = 0
        self._key = hold_weak(tensor.untyped_storage())
        self._last = Finalizer(free_weak, self._key)
        self._witness = tensor.detach()  # shares the version counter,
        self._witness.data = tensor.new_empty(0)  # and none of the memory
        self._version = tensor._version

    def again(self) -> torch.Tensor | None:
        """Return another tensor over the lent memory, with the same version counter; None when no tensor is alive."""
        storage = revive(self._key)
        if storage is None:
            return None
        tensor = self._witness.detach()
        tensor.data = whole_of(storage, self._witness.dtype)
        return tensor

    def spoiled(self) -> bool:
        """Return whether a write has changed the bytes."""
        return self._witness._version != self._version


class _Pages(np.ndarray):
    """Owner of a buffer's memory, which a storage keeps alive. Not a ctypes array: that makes a class for each size."""

    last: Finalizer


def lend(
    parcel: P, memory: torch.Tensor, dtype: torch.dtype, returned: Callable[[Loan[P]], None]
) -> tuple[Loan[P], torch.Tensor]:
    """Return a loan and a 1-d tensor over the `memory` of a parcel.

    Parameters
    ----------
    memory : Tensor, (nbytes,) uint8, on the host
    returned : a function written in C, called with the loan when the last of its tensors dies
    """
    pages = memory.numpy().view(_Pages)
    tensor = torch.frombuffer(pages, dtype=dtype)
    loan = Loan(parcel, tensor)
    pages.last = Finalizer(returned, loan)  # dies with the pages
    return loan, tensor
