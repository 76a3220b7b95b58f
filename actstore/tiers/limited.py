"""A tier with a budget of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

import torch

from actstore.base.reaper import Finalizer, Reaper
from actstore.base.ticket import Ticket
from actstore.tiers.base import Slot, Tier


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
