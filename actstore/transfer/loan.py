"""Fetched bytes that serve as a tensor's own memory, without a copy, where the compute device is a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch

from actstore.base.reaper import Finalizer
from actstore.base.storage import FleetingTensor

P = TypeVar("P")  # the owner of the bytes: Parcel


class Loan(FleetingTensor, Generic[P]):
    """The buffer of a parcel while tensors have it as their memory. Not thread-safe.

    Code may write to the tensors, as to any tensor that autograd unpacks. Their shared version counter reveals it.

    Attributes
    ----------
    parcel : owner of the bytes; None once a write has changed them
    users : number of users of the parcel that these tensors stand for
    """

    __slots__ = ("parcel", "users")

    def __init__(self, parcel: P, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.parcel: P | None = parcel
        self.users = 0


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
