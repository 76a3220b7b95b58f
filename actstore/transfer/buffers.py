"""Memory of the compute device that parcels reuse from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from actstore.base.ticket import Ticket
from actstore.devices import Device


class Buffer:
    """Device memory, and the operations that may still use it.

    Attributes
    ----------
    memory : Tensor, 1-d uint8
    home : the stream whose allocator gave the memory
    after : operations that must end before the next write to the memory
    """

    __slots__ = ("after", "home", "memory")

    def __init__(self, memory: torch.Tensor, home: Any) -> None:
        self.memory = memory
        self.home = home
        self.after: Sequence[Ticket] = ()


class Buffers:
    """Buffers of exact sizes. Not thread-safe.

    Used and idle bytes together never exceed the peak of used bytes in this step and the last (`trim` begins a step).
    So variable shapes cannot make it grow, and a steady state allocates nothing.

    Parameters
    ----------
    poison : whether to fill each buffer with NaN before its use, so that a premature read finds no old bytes
    """

    def __init__(self, device: Device, *, poison: bool = False) -> None:
        self._device = device
        self._poison = poison
        self._idle: dict[int, list[Buffer]] = {}
        self._idle_nbytes = 0
        self._used_nbytes = 0
        self._high_nbytes = 0  # peak of used bytes in this step
        self._last_nbytes = 0  # peak in the last step
        self.allocated = 0  # number of allocations

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer of exactly `nbytes`. On any stream, a write to it must come after its `after`."""
        self._used_nbytes += nbytes
        self._high_nbytes = max(self._high_nbytes, self._used_nbytes)
        sized = self._idle.get(nbytes)
        if sized:
            self._idle_nbytes -= nbytes
            return self._poisoned(sized.pop())
        self._shrink()
        home = self._device.current()
        try:
            buffer = Buffer(self._device.empty(nbytes), home)
        except BaseException:
            self._used_nbytes -= nbytes
            raise
        self.allocated += 1
        buffer.after = (self._device.record(home),)  # its queued work may still use the memory
        return self._poisoned(buffer)

    def give(self, buffer: Buffer, after: Sequence[Ticket]) -> None:
        """Take a buffer back, whose last uses are `after`."""
        nbytes = buffer.memory.numel()
        buffer.after = after
        self._used_nbytes -= nbytes
        self._idle.setdefault(nbytes, []).append(buffer)
        self._idle_nbytes += nbytes
        self._shrink()

    def forget(self, buffer: Buffer) -> None:
        """Drop a buffer that a tensor or a failed copy may still write to at any time, so that it is never reused."""
        self._used_nbytes -= buffer.memory.numel()

    def trim(self) -> None:
        """Begin a step: return memory that the last step did not need."""
        self._last_nbytes, self._high_nbytes = self._high_nbytes, self._used_nbytes
        self._shrink()

    def close(self) -> None:
        """Return all idle memory, and from now on each buffer that comes back."""
        self._high_nbytes = self._last_nbytes = 0
        self._shrink()

    def _poisoned(self, buffer: Buffer) -> Buffer:
        if self._poison:
            stream = self._device.current()
            for ticket in buffer.after:
                ticket.wait_on(stream)
            buffer.memory.fill_(0xFF)
            buffer.after = (self._device.record(stream),)
        return buffer

    def _shrink(self) -> None:
        most = max(self._high_nbytes, self._last_nbytes)
        while self._idle_nbytes and self._idle_nbytes + self._used_nbytes > most:
            nbytes, sized = next(iter(self._idle.items()))
            if sized:
                buffer = sized.pop(0)
                for ticket in buffer.after:  # so that later work on the home stream gets the memory after these
                    ticket.wait_on(buffer.home)
                self._idle_nbytes -= nbytes
            if not sized:
                del self._idle[nbytes]
