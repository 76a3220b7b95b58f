"""Fetched bytes that serve as a tensor's own memory, where the compute device is a CPU: a copy less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch

from actstore.base.reaper import Finalizer
from actstore.base.storage import free_weak, hold_weak, revive, whole_of

P = TypeVar("P")  # what the bytes travel in


class Loan(Generic[P]):
    """The buffer of a parcel while tensors use it as theirs. Not thread-safe.

    They may write to it, as to any tensor that autograd unpacks; the version that they share tells.

    Attributes
    ----------
    parcel : whose bytes they are; None once they are no longer, because somebody changed them
    users : how often the parcel was asked for and is in use by these tensors
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
        """Another tensor over the memory that is lent, sharing the version counter; None when nobody uses it now."""
        storage = revive(self._key)
        if storage is None:
            return None
        tensor = self._witness.detach()
        tensor.data = whole_of(storage, self._witness.dtype)
        return tensor

    def spoiled(self) -> bool:
        """Whether somebody has changed the bytes."""
        return self._witness._version != self._version


class _Pages(np.ndarray):
    """Memory that a storage holds, and that holds its buffer's. Not an array of ctypes: each size of one is a class."""

    last: Finalizer


def lend(
    parcel: P, memory: torch.Tensor, dtype: torch.dtype, returned: Callable[[Loan[P]], None]
) -> tuple[Loan[P], torch.Tensor]:
    """The `memory` of a parcel as a 1-d tensor.

    Parameters
    ----------
    memory : Tensor, (nbytes,) uint8, on the host
    returned : a function written in C, called with the loan when the last tensor over them is gone
    """
    pages = memory.numpy().view(_Pages)
    tensor = torch.frombuffer(pages, dtype=dtype)
    loan = Loan(parcel, tensor)
    pages.last = Finalizer(returned, loan)  # dies with the pages
    return loan, tensor
