"""Memory of the compute device for parcels, reused from step to step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from actstore.base.reaper import Finalizer
from actstore.base.ticket import Ticket
from actstore.devices import Device


class Buffer:
    """Device memory, and the operations that may still use it.

    Attributes
    ----------
    memory : Tensor, 1-d uint8
    home : the stream whose allocator gave the memory
    after : operations that must end before the next write to the memory
    size : gives back what the memory counts for when the buffer dies, wherever an interrupt (Ctrl-C) has lost it
    """

    __slots__ = ("after", "home", "memory", "size")

    def __init__(self, memory: torch.Tensor, home: Any, size: Finalizer) -> None:
        self.memory = memory
        self.home = home
        self.after: Sequence[Ticket] = ()
        self.size = size


class Holder(Protocol):
    """Owner of a buffer."""

    buffer: Buffer | None


class Buffers:
    """Buffers of exact sizes. Not thread-safe. An interrupt comes after a call: all that follows it, or nothing.

    Used and idle bytes together never exceed the peak of used bytes in this step and the last (`trim` begins a step).
    So variable shapes cannot make it grow, and a steady state allocates nothing. Where freed memory serves other
    tensors (`Device.recycles`), no buffer is idle: activations and gradients get it meanwhile.

    Parameters
    ----------
    poison : whether to fill each buffer with NaN before its use, so that a premature read finds no old bytes
    """

    def __init__(self, device: Device, *, poison: bool = False) -> None:
        self._device = device
        self._poison = poison
        self._idle: dict[int, list[Buffer]] = {}
        self._idle_nbytes = 0
        self._all_nbytes = 0  # used and idle
        self._died: deque[list[int]] = deque()  # what buffers count for that are gone
        self._high_nbytes = 0  # peak of used bytes in this step
        self._last_nbytes = 0  # peak in the last step
        self.allocated = 0  # number of allocations

    @property
    def used_nbytes(self) -> int:
        """Bytes of the buffers that are not idle."""
        while self._died:
            self._uncount(self._died[0])
            self._died.popleft()
        return self._all_nbytes - self._idle_nbytes

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer of exactly `nbytes`. On any stream, a write to it must come after its `after`."""
        self._high_nbytes = max(self._high_nbytes, self.used_nbytes + nbytes)
        sized = self._idle.get(nbytes)
        if sized:
            buffer = sized[-1]
            self._make_poisonous(buffer)
            del sized[-1]
            self._idle_nbytes -= nbytes
            return buffer
        self.shrink(nbytes)
        home = self._device.current()
        count = [0]
        buffer = Buffer(self._device.empty(nbytes), home, Finalizer(self._died.append, count))
        buffer.after = (self._device.record(home),)  # its queued work may still use the memory
        self._make_poisonous(buffer)
        count[0] = nbytes
        self._all_nbytes += nbytes
        self.allocated += 1
        return buffer

    def give(self, buffer: Buffer, after: Sequence[Ticket], holder: Holder | None = None) -> None:
        """Take a buffer back from its holder, whose last uses are `after`. Call `shrink` at some time after it."""
        nbytes = buffer.memory.numel()
        if not after and self._device.recycles(nbytes):
            if holder is not None:
                holder.buffer = None
            return  # it dies with the caller's last reference
        sized = self._idle.setdefault(nbytes, [])
        if holder is not None:
            holder.buffer = None
        buffer.after = after
        sized += [buffer]
        self._idle_nbytes += nbytes

    def forget(self, buffer: Buffer) -> None:
        """Drop a buffer that a tensor or a failed copy may still write to at any time, so that it is never reused."""
        self._uncount(buffer.size.args[0])

    def trim(self) -> None:
        """Begin a step: return memory that the last step did not need."""
        self._last_nbytes, self._high_nbytes = self._high_nbytes, self.used_nbytes
        self.shrink()

    def close(self) -> None:
        """Return all idle memory, and from now on each buffer that comes back."""
        self._high_nbytes = self._last_nbytes = 0
        self.shrink()

    def shrink(self, more_nbytes: int = 0) -> None:
        """Return idle memory until what there is, and `more_nbytes`, are within the bound."""
        most = max(self._high_nbytes, self._last_nbytes)
        while self._idle_nbytes and self._idle_nbytes + self.used_nbytes + more_nbytes > most:
            nbytes, sized = next(iter(self._idle.items()))
            if sized:
                buffer = sized[0]
                for ticket in buffer.after:  # so that later work on the home stream gets the memory after these
                    ticket.wait_on(buffer.home)
                self._uncount(buffer.size.args[0])
                del sized[0]
                self._idle_nbytes -= nbytes
            if not sized:
                del self._idle[nbytes]

    def _uncount(self, count: list[int]) -> None:
        self._all_nbytes -= count[0]
        count[0] = 0

    def _make_poisonous(self, buffer: Buffer) -> None:
        if self._poison:
            stream = self._device.current()
            for ticket in buffer.after:
                ticket.wait_on(stream)
            buffer.memory.fill_(0xFF)
            buffer.after = (self._device.record(stream),)
