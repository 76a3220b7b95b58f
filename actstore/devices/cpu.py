"""The CPU as a compute device: its memory is the host's, and work is done when a call returns."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from time import perf_counter_ns
from typing import Any

import torch

from actstore.base.ticket import DONE, Done, Ticket
from actstore.base.units import format_nbytes
from actstore.devices import cpu_memory
from actstore.devices.base import Device, Workers
from actstore.devices.cpu_memory import CountedPages
from actstore.devices.workers import Threads

HUGE_PAGE_NBYTES = 2 << 20


def map_pages(nbytes: int) -> mmap.mmap:
    """Map pages of zeros, outside of the heap.

    On Linux large mappings ask for huge pages: a disk writes and reads them faster, with less processor time.

    Raises
    ------
    MemoryError : the system has no more memory, which it reports as an OSError
    """
    try:
        pages = CountedPages(nbytes)
    except OSError as error:
        raise MemoryError(f"the system refused {format_nbytes(nbytes)} of memory: {error}") from error
    if nbytes >= HUGE_PAGE_NBYTES and sys.platform == "linux":
        with suppress(OSError):  # a system without huge pages: only slower
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class Cpu(Device):
    """The host. Work beside the calling thread runs on worker threads."""

    on_host = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def current(self) -> Any:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def stream(self) -> Any:
        return None

    def record(self, stream: Any) -> Ticket:
        return DONE

    def mark(self, stream: Any) -> Ticket:
        now = perf_counter_ns()
        return Done((now, now))

    def wait(self, stream: Any, ticket: Ticket) -> Ticket | None:
        if ticket.ready():
            ticket.wait_on(stream)
            return None
        begin = perf_counter_ns()
        ticket.wait_on(stream)
        return Done((begin, perf_counter_ns()))

    def allocated(self, *, reset: bool = False) -> tuple[int, int] | None:
        if reset:
            cpu_memory.reset_peak()
        now, peak = cpu_memory.memory_allocated(), cpu_memory.max_memory_allocated()
        return None if now is None or peak is None else (now, peak)

    def recycles(self, nbytes: int) -> bool:
        status = cpu_memory.status()
        return status is not None and status.choice == "pages" and nbytes >= cpu_memory.MIN_PAGED_NBYTES

    def empty(self, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if self.recycles(nbytes):
            try:
                block = torch.empty(nbytes + cpu_memory.PAGE_NBYTES, dtype=torch.uint8, device="cpu")
            except torch.OutOfMemoryError as error:
                raise MemoryError(f"the system refused {format_nbytes(nbytes)} of memory: {error}") from error
            begin = -block.data_ptr() % cpu_memory.PAGE_NBYTES
            return block[begin : begin + nbytes]
        return torch.frombuffer(map_pages(nbytes), dtype=torch.uint8, count=nbytes)

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        return self.empty(nbytes)

    def unpin(self, memory: torch.Tensor) -> None:
        """Do nothing: the last reference returns the memory."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any, after: Iterable[Ticket] = ()) -> Ticket:
        for ticket in after:
            ticket.wait_on(stream)
        begin = perf_counter_ns()
        dst.copy_(src)
        return Done((begin, perf_counter_ns()))

    def workers(self, count: int, name: str) -> Workers:
        return Threads(count, name)
