"""What a tier is: a place with a capacity where payloads wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from actstore.errors import StateError
from actstore.ticket import DONE, Ticket


class Slot:
    """Room reserved in a tier.

    Attributes
    ----------
    nbytes : bytes reserved
    buffer : the memory itself, 1-d uint8, in tiers that are memory; None elsewhere
    place : the tier's own record of where the room is
    written : the write that filled it; what reads it comes after that
    tier : who takes it back; its own tier, or a wrapper of that
    """

    __slots__ = ("buffer", "nbytes", "place", "tier", "written")

    tier: Tier

    def __init__(self, nbytes: int, buffer: torch.Tensor | None = None, place: Any = None) -> None:
        self.nbytes = nbytes
        self.buffer = buffer
        self.place = place
        self.written: Ticket = DONE

    @property
    def memory(self) -> torch.Tensor:
        """The buffer of a slot in a tier that is memory.

        Raises
        ------
        StateError : the slot was given back, as `close` does with all of them
        """
        if self.buffer is None:
            raise StateError("this slot was given back; close the store after the last backward")
        return self.buffer


class Tier(ABC):
    """A place where payloads wait. Thread-safe; `free` is safe in finalizers.

    `on_device` says whether its bytes lie in the memory of the compute device, and so count as held there.
    """

    name: ClassVar[str]
    on_device: bool = False

    @abstractmethod
    def reserve(self, nbytes: int) -> Slot | None:
        """Room for `nbytes`, or None when the tier is full.

        Raises
        ------
        StateError : the tier is closed
        """

    @abstractmethod
    def write(self, slot: Slot, src: torch.Tensor) -> Ticket:
        """Start to copy `src` into the slot, after all work queued on the current stream of `src`'s device.

        Parameters
        ----------
        src : Tensor, 1-d uint8, `slot.nbytes` long; unchanged until the ticket says that the bytes have left it
        """

    @abstractmethod
    def read(self, slot: Slot, dst: torch.Tensor) -> Ticket:
        """Copy the slot into `dst`, in the order of the current stream of `dst`'s device; on a CPU before returning.

        Raises
        ------
        TransferError : the write failed, or the bytes cannot be read
        PayloadError : the bytes read are not the bytes written
        StateError : the tier was closed
        """

    @abstractmethod
    def free(self, slot: Slot) -> None:
        """Give the room back. The slot is not used again."""

    def trim(self) -> None:  # noqa: B027  # most tiers keep nothing idle
        """Return idle memory beyond what the last step needed."""

    @abstractmethod
    def close(self) -> None:
        """Return everything. Whoever reserves or reads afterwards gets StateError."""
