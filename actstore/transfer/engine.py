"""Moves payloads off the compute device within one window of bytes in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import torch

from actstore.ticket import Ticket
from actstore.tiers import Slot, Tier

DEVICE_WINDOW_NBYTES = 256 * 2**20  # copies on a stream: about 5 ms of a 55 GB/s link
HOST_WINDOW_NBYTES = 8 * 2**20  # writes by a host thread, where each waiting byte is a byte still held


class _Flight(NamedTuple):
    ticket: Ticket
    stream: Any  # the buffer came from this stream's allocator; None on a CPU
    buffer: torch.Tensor
    landed: Callable[[torch.Tensor], None]


class Transfer:
    """Offloads buffers to tiers. Thread-safe.

    The window bounds bytes that have been encoded and not yet left. When it is full, the compute stream waits for the
    oldest copy (the host does not); where a host thread is the one that copies, the host waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._window_nbytes = HOST_WINDOW_NBYTES if device.type == "cpu" else DEVICE_WINDOW_NBYTES
        self._flights: deque[_Flight] = deque()
        self._nbytes = 0
        self._lock = Lock()
        self._gate = Lock()  # one offload at a time, so that the window holds for several threads

    def offload(self, tier: Tier, slot: Slot, buffer: torch.Tensor, landed: Callable[[torch.Tensor], None]) -> None:
        """Start to move `buffer` into `slot`; `landed(buffer)` is called once its bytes have left.

        A buffer larger than the window flies alone.
        """
        self.poll()
        with self._gate:
            while self._flights and self._nbytes + buffer.numel() > self._window_nbytes:
                self._land_oldest()
            ticket = tier.write(slot, buffer)
            stream = None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device)
            with self._lock:
                self._flights.append(_Flight(ticket, stream, buffer, landed))
                self._nbytes += buffer.numel()

    def poll(self) -> None:
        """Let go of buffers whose bytes have left, without waiting."""
        while (flight := self._oldest()) is not None and flight.ticket.ready():
            self._land(flight)

    def drain(self) -> None:
        """Have every flight land; what is said of a full window holds here too."""
        while self._flights:
            self._land_oldest()

    def _land_oldest(self) -> None:
        flight = self._oldest()
        if flight is not None:
            flight.ticket.wait_on(flight.stream)  # before that stream's allocator uses the memory again
            self._land(flight)

    def _oldest(self) -> _Flight | None:
        with self._lock:
            return self._flights[0] if self._flights else None

    def _land(self, flight: _Flight) -> None:
        with self._lock:
            if not self._flights or self._flights[0] is not flight:
                return  # another thread was faster
            self._flights.popleft()
            self._nbytes -= flight.buffer.numel()
        flight.landed(flight.buffer)
