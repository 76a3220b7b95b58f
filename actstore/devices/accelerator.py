"""Accelerators, through torch's device-independent streams and events: CUDA, ROCm, XPU and more."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from threading import Lock
from time import perf_counter_ns
from typing import Any

import torch

from actstore.base.ticket import EventTicket, Ticket
from actstore.devices import refusals
from actstore.devices.base import Device, Workers
from actstore.devices.cpu import map_pages
from actstore.devices.workers import Threads

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


class DeviceClock:
    """The times of one device's timed events, on the clock of the host (`time.perf_counter_ns`).

    Times between events are float32 milliseconds: over hours they are off by a quarter of one. So the zero moves along.
    """

    MAX_ELAPSED_MS = 4000.0  # half a microsecond off; beyond it, the event becomes the new zero

    def __init__(self, device: torch.device) -> None:
        stream: Any = torch.accelerator.current_stream(device)
        zero: Any = torch.Event(device, enable_timing=True)
        zero.record(stream)
        zero.synchronize()
        self._zero = zero, perf_counter_ns()

    def ns(self, event: Any) -> int:
        zero, zero_ns = self._zero
        ms = zero.elapsed_time(event)
        now = zero_ns + int(ms * 1e6)
        if ms > self.MAX_ELAPSED_MS:
            self._zero = event, now
        return now


class Accelerator(Device):
    """A device with memory and streams of its own."""

    on_host = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._clock = DeviceClock(torch_device)
        if torch_device.type == "cuda":
            refusals.observe()
        self._lock = Lock()  # a torch.Stream can be entered by one thread at a time
        self._idle: deque[Any] = deque()  # events whose tickets are gone
        self._pages: dict[int, mmap.mmap] = {}  # pinned by us, by address
        weakref.finalize(self, _unregister, self._pages, torch_device).atexit = False

    def current(self) -> Any:
        return torch.accelerator.current_stream(self.torch_device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        other: Any = torch.Stream(  # an object of its own: one can be entered by one thread at a time
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        return other  # type: ignore[no-any-return]

    def stream(self) -> Any:
        return torch.Stream(device=self.torch_device)

    def record(self, stream: Any) -> Ticket:
        try:
            event: Any = self._idle.pop()
        except IndexError:
            event = torch.Event(self.torch_device)
        event.record(stream)
        return EventTicket(event, idle=self._idle)

    def mark(self, stream: Any) -> Ticket:
        event = self._timed(stream)
        return EventTicket(event, event, self._clock)

    def wait(self, stream: Any, ticket: Ticket) -> Ticket | None:
        if not self.timing or ticket.ready():
            ticket.wait_on(stream)
            return None
        begin = self._timed(stream)
        ticket.wait_on(stream)
        return EventTicket(self._timed(stream), begin, self._clock)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def spare_nbytes(self) -> int:
        device = self.torch_device
        if device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
        return max(0, min(free, limit - reserved) + reserved - torch.cuda.max_memory_allocated(device))

    def allocated(self, *, reset: bool = False) -> tuple[int, int] | None:
        device = self.torch_device
        if reset and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        # `memory_stats` would flatten and sort a hundred figures
        stats = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else {}
        found = stats.get("allocated_bytes", {}).get("all")  # absent for an allocator that a plugin brings
        return None if found is None else (int(found["current"]), int(found["peak"]))

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any, after: Iterable[Ticket] = ()) -> Ticket:
        for ticket in after:  # not under the lock: the host waits here for threads that may need it
            ticket.wait_on(stream)
        with self._lock:
            begin = self._timed(stream) if self.timing else None
            with stream:
                dst.copy_(src, non_blocking=True)
            return self.record(stream) if begin is None else EventTicket(self._timed(stream), begin, self._clock)

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        if self.torch_device.type == "cuda":  # and ROCm, which torch calls so
            return self._registered(nbytes)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:  # a refusal, whatever the backend calls it
            return None

    def unpin(self, memory: torch.Tensor) -> None:
        # The pages are unmapped with the last tensor that lies in them; other pinned memory is torch's to return.
        pages = self._pages.pop(memory.data_ptr(), None)
        if pages is not None:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))

    def _registered(self, nbytes: int) -> torch.Tensor | None:
        """Pin exactly `nbytes` of whole pages; torch's own allocator takes the next power of two."""
        nbytes -= nbytes % -mmap.PAGESIZE
        try:
            pages = map_pages(nbytes)
        except MemoryError:
            return None
        pages.madvise(mmap.MADV_DONTFORK)  # fork copies pinned pages at once: each data loader would take as much again
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        with torch.accelerator.device_index(self.torch_device.index):
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, PORTABLE))
            if code:
                # The CUDA runtime keeps the error, and the next kernel launch of this thread raises it. Torch has no
                # call to clear it: make that launch here.
                with suppress(RuntimeError):
                    torch.ones(1, device=self.torch_device)
                return None
        self._pages[memory.data_ptr()] = pages
        return memory

    def workers(self, count: int, name: str) -> Workers:
        return Threads(count, name)

    def _timed(self, stream: Any) -> Any:
        event: Any = torch.Event(self.torch_device, enable_timing=True)
        event.record(stream)
        return event


def _unregister(pages: dict[int, mmap.mmap], device: torch.device) -> None:
    """Unpin the memory of a store that the caller did not close, before it is unmapped."""
    if pages:
        torch.accelerator.synchronize(device)
        for address in pages:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
