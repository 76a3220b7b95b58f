"""The host tier: payloads wait in pinned CPU memory and travel on streams of their own."""

from __future__ import annotations

from collections.abc import Iterable
from threading import RLock
from typing import ClassVar

import torch

from actstore.base.ticket import Ticket
from actstore.devices.base import Device
from actstore.errors import StateError
from actstore.tiers.arena import Arena, Range, room
from actstore.tiers.base import Slot, Tier
from actstore.tiers.device import too_late


class HostTier(Tier):
    """Pinned memory beside an accelerator.

    Tickets order the operations on the memory of one slot; the host never waits for them:

    1. a write runs on the offload stream, after the work that made its source and after earlier uses of its memory;
    2. reads run on the fetch stream, after the write and after the last use of their target;
    3. the memory may go back before any of them is complete: their tickets go with it, and its next owner's write comes
       after them.

    Parameters
    ----------
    most_nbytes : limit of host memory, idle parts included; None for no limit
    """

    name: ClassVar[str] = "host"

    def __init__(self, device: Device, most_nbytes: int | None = None) -> None:
        self._device = device
        self._arena = Arena(device, most_nbytes)
        self._offload = device.stream()
        self._fetch = device.stream()
        self._closed = False
        self._lock = RLock()  # nothing is queued once `close` waits for the streams

    @property
    def pinned(self) -> bool:
        """Return whether new memory is pinned: False once the system has refused to pin more."""
        return self._arena.pinned

    def room(self, nbytes: int) -> int:
        return room(nbytes)

    def reserve(self, nbytes: int) -> Slot | None:
        taken = self._arena.take(nbytes)
        return None if taken is None else Slot(nbytes, taken.memory, _PinnedRange(taken))

    def write(self, slot: Slot, src: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        place: _PinnedRange = slot.place
        with self._lock:
            if self._closed:
                raise StateError("the host tier is closed. Make a new ActivationStore.")
            place.starting = True
            slot.written = self._device.copy(
                slot.memory[: src.numel()], src, self._offload, (*place.range.after, *after)
            )
            place.starting = False
        return slot.written

    def read(self, slot: Slot, dst: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        place: _PinnedRange = slot.place
        with self._lock:
            if self._closed:
                return too_late(self.name)
            place.starting = True
            ticket = self._device.copy(dst, slot.memory[: dst.numel()], self._fetch, (slot.written, *after))
            place.reads = [*(read for read in place.reads if not read.ready()), ticket]
            place.starting = False
        return ticket

    def free(self, slot: Slot) -> None:
        place: _PinnedRange = slot.place
        memory, slot.buffer = slot.buffer, None
        if memory is None:
            return
        after = [slot.written, *place.reads]
        if place.starting:  # an interrupt (Ctrl-C) fell between the start of a copy and its record
            after += [self._device.record(self._offload), self._device.record(self._fetch)]
        self._arena.free(place.range, after)

    def trim(self) -> None:
        self._arena.trim()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for stream in (self._offload, self._fetch):
            self._device.record(stream).result()
        self._arena.close()


class _PinnedRange:
    """The memory of a slot, and the reads of it that may still run."""

    __slots__ = ("range", "reads", "starting")

    def __init__(self, taken: Range) -> None:
        self.range = taken
        self.reads: list[Ticket] = []
        self.starting = False  # a copy is about to be queued, or was, and its ticket is not recorded yet
