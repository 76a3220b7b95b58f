"""The device tier: payloads wait in the memory of the compute device, where they were encoded."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any, ClassVar

import torch

from actstore.base.job import Job
from actstore.base.reaper import Finalizer, Reaper
from actstore.base.ticket import JobTicket, Ticket
from actstore.devices.base import Device
from actstore.errors import StateError
from actstore.tiers.base import Slot, Tier
from actstore.tiers.pool import BufferPool


class DeviceTier(Tier):
    """Memory of the compute device. On a CPU this is host memory, pooled; elsewhere torch's allocator pools.

    Copies run on the current stream. Torch gives freed memory to later work of the stream on which it was reserved:
    where another stream has used the slot, the tier keeps its memory until that work is complete.
    """

    name: ClassVar[str] = "device"
    on_device = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self.pool = BufferPool() if device.on_host else None
        self._closed = False
        self._lock = Lock()
        self._back = Reaper[tuple[torch.Tensor, list[Ticket]]](self._lock, self._receive)
        self._lent: list[tuple[torch.Tensor, list[Ticket]]] = []  # given back, and in use by another stream

    def reserve(self, nbytes: int) -> Slot | None:
        if self.pool is not None:
            memory, idle = self.pool.take(nbytes)
            last = Finalizer(idle.append, memory)
            slot = Slot(nbytes, memory)
            slot.last = last
            return slot
        if self._closed:
            raise StateError(f"the {self.name} tier is closed. Make a new ActivationStore.")
        self._let_go()
        home = self._device.current()
        return Slot(nbytes, self._device.empty(nbytes), _ReservedMemory(home))

    def write(self, slot: Slot, src: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        if self._closed:
            raise StateError(f"the {self.name} tier is closed. Make a new ActivationStore.")
        slot.written = self._copy(slot, slot.memory[: src.numel()], src, after)
        return slot.written

    def read(self, slot: Slot, dst: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        if self._closed:
            return too_late(self.name)
        return self._copy(slot, dst, slot.memory[: dst.numel()], (slot.written, *after))

    def used(self, slot: Slot) -> None:
        if self.pool is None:
            place: _ReservedMemory = slot.place
            stream = self._device.current()
            if stream != place.home:
                self._lend(slot, self._device.record(stream))

    def free(self, slot: Slot) -> None:
        slot.buffer = slot.last = None
        if self._closed and self.pool is not None:
            self.pool.drain()

    def trim(self) -> None:
        if self.pool is not None:
            self.pool.trim()
        else:
            self._let_go()

    def close(self) -> None:
        self._closed = True
        if self.pool is not None:
            self.pool.close()
            return
        with self._lock:
            self._back.drain_locked()
            lent, self._lent = self._lent, []
        for _, after in lent:
            for ticket in after:
                ticket.result()

    def _copy(self, slot: Slot, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket]) -> Ticket:
        stream = self._device.current()
        ticket = self._device.copy(dst, src, stream, after)
        if self.pool is None and stream != slot.place.home:
            self._lend(slot, ticket)
        return ticket

    def _lend(self, slot: Slot, ticket: Ticket) -> None:
        """Keep the memory of a slot, should it die, until another stream has left it."""
        slot.place.strangers.append(ticket)
        if slot.last is None:
            slot.last = Finalizer(self._back.put, (slot.buffer, slot.place.strangers))

    def _let_go(self) -> None:
        """Free the memory with which other streams are done."""
        if self._back.queue or self._lent:
            with self._lock:
                self._back.drain_locked()
                self._lent = [(memory, after) for memory, after in self._lent if not _all_ready(after)]

    def _receive(self, item: tuple[torch.Tensor, list[Ticket]]) -> None:
        self._lent.append(item)


class _ReservedMemory:
    """The stream on which memory was reserved, and operations that other streams have started on it."""

    __slots__ = ("home", "strangers")

    def __init__(self, home: Any) -> None:
        self.home = home
        self.strangers: list[Ticket] = []


def too_late(name: str) -> Ticket:
    """Return the ticket of a read from a closed tier: its result is the error."""
    error = StateError(f"the {name} tier was closed, and its bytes are gone. Close the store after backward.")
    return JobTicket([Job.failed(error)])


def _all_ready(tickets: Iterable[Ticket]) -> bool:
    return all(ticket.ready() for ticket in tickets)


class HostMemoryTier(DeviceTier):
    """The host tier where the compute device is the CPU: the same memory, so its bytes count as held."""

    name: ClassVar[str] = "host"
