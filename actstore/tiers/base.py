"""The interface of a tier: a place with a capacity where payloads wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from threading import Lock
from typing import Any, ClassVar

import torch

from actstore.base.reaper import Finalizer, Reaper
from actstore.base.ticket import DONE, Ticket
from actstore.errors import StateError


class Slot:
    """Room reserved in a tier.

    Attributes
    ----------
    nbytes : bytes reserved
    buffer : the memory itself, 1-d uint8, in tiers that are memory; None elsewhere
    place : the tier's own record of the room
    written : the write that filled the slot; reads come after it
    last : in tiers of the compute device, an object that gives the memory back when the slot dies
    tier : the tier that takes the slot back: its own tier, or a wrapper of that
    """

    __slots__ = ("buffer", "last", "nbytes", "place", "tier", "written")

    tier: Tier

    def __init__(self, nbytes: int, buffer: torch.Tensor | None = None, place: Any = None) -> None:
        self.nbytes = nbytes
        self.buffer = buffer
        self.place = place
        self.written: Ticket = DONE
        self.last: Any = None

    @property
    def memory(self) -> torch.Tensor:
        """The buffer of a slot in a tier that is memory.

        Raises
        ------
        StateError : the slot was given back, as `close` does with all of them
        """
        if self.buffer is None:
            raise StateError("this slot was given back. Close the store after the last backward.")
        return self.buffer


class Tier(ABC):
    """A place where payloads wait. Thread-safe; `free` is safe in finalizers.

    `on_device` says whether its bytes lie in the memory of the compute device, and so count as held there. `alone` says
    whether each payload is written by itself, to the byte: no other payload beside it, and no bytes after its end.
    """

    name: ClassVar[str]
    on_device: bool = False
    alone: bool = False

    def room(self, nbytes: int) -> int:
        """Return the bytes that a slot of `nbytes` takes; a budget counts these."""
        return nbytes

    def held_nbytes(self, nbytes: int) -> int:
        """Return the bytes of a payload of `nbytes` that the tier itself has in the memory of the compute device."""
        return 0

    @abstractmethod
    def reserve(self, nbytes: int) -> Slot | None:
        """Reserve room for `nbytes`; None when the tier is full.

        Raises
        ------
        StateError : the tier is closed
        """

    @abstractmethod
    def write(self, slot: Slot, src: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        """Start to copy `src` into the slot, after all of `after`. The caller does not wait.

        Parameters
        ----------
        src : Tensor, 1-d uint8, at most `slot.nbytes` long, on the compute device; the caller does not change it until
            the ticket is complete
        after : the operations that made `src`, such as a ticket of the compute stream that still works on it

        Raises
        ------
        StateError : the tier is closed
        """

    @abstractmethod
    def read(self, slot: Slot, dst: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        """Start to copy the beginning of the slot into `dst`, after its write and all of `after`, without a wait.

        `ticket.result()` raises TransferError where the write failed or the bytes cannot be read. It raises
        PayloadError where they are not the bytes written. It raises StateError where the tier was closed or the bytes
        belong to the parent of a forked process.

        Parameters
        ----------
        dst : Tensor, 1-d uint8, as long as the bytes written, on the compute device; the caller does not use it until
            the ticket is complete
        after : the last uses of `dst`
        """

    def used(self, slot: Slot) -> None:  # noqa: B027  # only tiers that lend their memory care
        """Note that the current stream uses the memory of `slot` up to now, without `write` or `read`."""

    @abstractmethod
    def free(self, slot: Slot) -> None:
        """Give the room back. The caller does not use the slot again; a write or a read of it may still run.

        In tiers of the compute device the death of a slot does so too.
        No other slot gets the room before those operations are complete, or are ordered before its first use. The tier
        may skip operations that have not begun: their tickets are then complete.
        """

    def trim(self) -> None:  # noqa: B027  # most tiers keep nothing idle
        """Return idle memory beyond what the last step needed."""

    @abstractmethod
    def close(self) -> None:
        """Return all room. A later reserve, write or read ends with StateError."""


class Limited(Tier):
    """A wrapper of a tier that reserves at most `budget_nbytes` at any time, counted by the tier's `room`."""

    def __init__(self, tier: Tier, budget_nbytes: int) -> None:
        self.tier = tier
        self.name = tier.name  # type: ignore[misc]  # a wrapper has the name of the tier that it wraps
        self.on_device = tier.on_device
        self.alone = tier.alone
        self.budget_nbytes = budget_nbytes
        self._used_nbytes = 0
        self._lock = Lock()
        self._back = Reaper[int](self._lock, self._receive)

    def room(self, nbytes: int) -> int:
        return self.tier.room(nbytes)

    def held_nbytes(self, nbytes: int) -> int:
        return self.tier.held_nbytes(nbytes)

    def reserve(self, nbytes: int) -> Slot | None:
        taken = self.tier.room(nbytes)
        with self._lock:
            self._back.drain_locked()
            if self._used_nbytes + taken > self.budget_nbytes:
                return None
            self._used_nbytes += taken
            toll = Finalizer(self._back.put, taken)
        slot = self.tier.reserve(nbytes)
        if slot is not None:
            slot.last = (slot.last, toll)
        return slot

    def write(self, slot: Slot, src: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        return self.tier.write(slot, src, after)

    def read(self, slot: Slot, dst: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        return self.tier.read(slot, dst, after)

    def free(self, slot: Slot) -> None:
        self.tier.free(slot)
        slot.last = None

    def trim(self) -> None:
        self.tier.trim()

    def close(self) -> None:
        self.tier.close()

    def _receive(self, taken: int) -> None:
        self._used_nbytes -= taken
