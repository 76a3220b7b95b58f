"""The host tier: payloads wait in pinned CPU memory and travel on streams of their own."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any, ClassVar

import torch

from actstore.ticket import DONE, EventTicket, Ticket
from actstore.tiers.base import Slot, Tier
from actstore.tiers.device import DeviceTier
from actstore.tiers.pool import BufferPool


class HostTier(Tier):
    """Pinned memory beside an accelerator.

    Order of the operations on one buffer, all by device events and none by a wait of the host:

    1. the offload stream waits until the compute stream has encoded the payload, and until the buffer's previous owner
       has been written and read;
    2. the copy out runs on the offload stream;
    3. a read waits for that copy and runs on the stream that asks for it, of which there may be several;
    4. the buffer may go back to the pool before its last operation: the events of all that may still run stay with it.
    """

    name: ClassVar[str] = "host"

    def __init__(self, device: torch.device) -> None:
        self._pool = BufferPool(pin=True)
        self._stream = torch.Stream(device=device)
        self._busy: dict[int, list[Any]] = {}  # address of a buffer -> events of the operations that may still run
        self._lock = Lock()  # also because a torch.Stream can be entered by one thread at a time

    def reserve(self, nbytes: int) -> Slot:
        return Slot(nbytes, self._pool.take(nbytes))

    def write(self, slot: Slot, src: torch.Tensor) -> Ticket:
        buffer, stream = slot.memory, self._stream
        with self._lock:
            stream.wait_stream(torch.accelerator.current_stream(src.device))
            for event in self._busy.get(buffer.data_ptr(), ()):
                stream.wait_event(event)
            with stream:
                buffer.copy_(src, non_blocking=self._pool.pinned)
            slot.written = EventTicket(self._mark(buffer, stream))
        return slot.written

    def read(self, slot: Slot, dst: torch.Tensor) -> Ticket:
        buffer, stream = slot.memory, torch.accelerator.current_stream(dst.device)
        slot.written.wait_on(stream)
        dst.copy_(buffer, non_blocking=self._pool.pinned)
        with self._lock:
            self._mark(buffer, stream)
        return DONE

    def settle(self, slot: Slot) -> None:
        """Make the host wait until no stream uses the memory of `slot`, so that the host may write to it."""
        with self._lock:
            events = self._busy.pop(slot.memory.data_ptr(), [])
        for event in events:
            if not event.query():
                event.synchronize()

    def free(self, slot: Slot) -> None:
        buffer, slot.buffer = slot.buffer, None
        if buffer is not None:
            self._pool.give(buffer)

    def trim(self) -> None:
        self._pool.trim()
        with self._lock:
            running = ((address, _running(events)) for address, events in self._busy.items())
            self._busy = {address: events for address, events in running if events}

    def close(self) -> None:
        self._stream.synchronize()
        self._pool.close()
        with self._lock:
            self._busy.clear()

    def _mark(self, buffer: torch.Tensor, stream: Any) -> Any:
        """Remember that `buffer` is in use up to this point of `stream`."""
        event = torch.Event(stream.device)
        event.record(stream)
        address = buffer.data_ptr()
        self._busy[address] = [*_running(self._busy.get(address, ())), event]
        return event


def _running(events: Iterable[Any]) -> list[Any]:
    return [event for event in events if not event.query()]


class HostMemoryTier(DeviceTier):
    """The host tier where the compute device is the CPU: the same memory, so its bytes count as held."""

    name: ClassVar[str] = "host"
