"""The host tier: payloads wait in pinned CPU memory and travel on streams of their own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from actstore.ticket import DONE, EventTicket, Ticket
from actstore.tiers.base import Slot, Tier
from actstore.tiers.device import DeviceTier
from actstore.tiers.pool import BufferPool


class HostTier(Tier):
    """Pinned memory beside an accelerator.

    Order of one slot's operations, all by device events and none by a wait of the host:

    1. the offload stream waits until the compute stream has encoded the payload, and until the slot's previous owner
       has been read;
    2. the copy out runs on the offload stream;
    3. a read waits for that copy and runs on the stream that asks for it;
    4. the slot's memory goes back to the pool together with the event of its last operation.
    """

    name: ClassVar[str] = "host"

    def __init__(self, device: torch.device) -> None:
        self._pool = BufferPool(pin=True)
        self._stream = torch.Stream(device=device)
        self._busy: dict[int, Any] = {}  # address of a buffer -> event of the last operation on it

    def reserve(self, nbytes: int) -> Slot | None:
        return Slot(nbytes, self._pool.take(nbytes))

    def write(self, slot: Slot, src: torch.Tensor) -> Ticket:
        assert slot.buffer is not None
        stream = self._stream
        stream.wait_stream(torch.accelerator.current_stream(src.device))
        busy = self._busy.get(slot.buffer.data_ptr())
        if busy is not None:
            stream.wait_event(busy)
        with stream:
            slot.buffer.copy_(src, non_blocking=True)
        slot.written = self._mark(slot, stream)
        return slot.written

    def read(self, slot: Slot, dst: torch.Tensor) -> Ticket:
        assert slot.buffer is not None
        stream = torch.accelerator.current_stream(dst.device)
        slot.written.wait_on(stream)
        dst.copy_(slot.buffer, non_blocking=True)
        self._mark(slot, stream)
        return DONE

    def free(self, slot: Slot) -> None:
        buffer, slot.buffer = slot.buffer, None
        if buffer is not None:
            self._pool.give(buffer)

    def trim(self) -> None:
        self._pool.trim()
        self._busy = {address: event for address, event in list(self._busy.items()) if not event.query()}

    def close(self) -> None:
        self._stream.synchronize()
        self._pool.close()
        self._busy.clear()

    def _mark(self, slot: Slot, stream: Any) -> Ticket:
        assert slot.buffer is not None
        event = torch.Event(stream.device)
        event.record(stream)
        self._busy[slot.buffer.data_ptr()] = event
        return EventTicket(event)


class HostMemoryTier(DeviceTier):
    """The host tier where the compute device is the CPU: the same memory, so its bytes count as held."""

    name: ClassVar[str] = "host"
