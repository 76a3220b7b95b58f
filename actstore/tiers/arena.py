"""Pinned host memory: exact sizes from large segments that are registered once."""

from __future__ import annotations

import mmap
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from threading import Lock

import torch

from actstore.base.job import Job
from actstore.base.reaper import Reaper
from actstore.base.ticket import Ticket
from actstore.base.units import format_nbytes, round_up
from actstore.devices.base import Device, Workers
from actstore.devices.cpu import map_pages
from actstore.errors import StateError
from actstore.tiers.extents import Extents

ALIGN_NBYTES = 64  # a cache line, which no two ranges share
SEGMENT_NBYTES = 64 * 2**20  # the least that is registered at once
GROWTH_DIVISOR = 8  # a new segment has at least 1/8 of the arena's bytes: few registrations, and few idle bytes
AHEAD_NBYTES = 2 * 2**30  # an arena as large pins its next segment in a thread: a GiB takes 0.18 s
AHEAD_DIVISOR = 4  # while a step has added a quarter of its bytes
IDLE_STEPS = 8  # a segment stays unused so long; with 2, variable lengths register a sixth of their bytes in each step


class Segment:
    """Memory and its free ranges, the lowest address first. Not thread-safe.

    Attributes
    ----------
    unused_steps : steps that have begun since a range was last taken
    """

    def __init__(self, memory: torch.Tensor, pinned: bool) -> None:
        self.memory = memory
        self.nbytes = memory.numel()
        self.pinned = pinned
        self.unused_steps = 0
        self._extents = Extents()
        self._expected: list[tuple[int, int, Sequence[Ticket]]] = []  # of free or taken ranges: start, end, until when

    def take(self, size: int) -> int | None:
        """Take a free range, and return its start; None where no free range has this size."""
        start = self._extents.take_within(size, self.nbytes)
        if start is not None:
            self.unused_steps = 0
        return start

    def give(self, start: int, size: int) -> None:
        self._extents.give(start, size)

    def expect(self, start: int, size: int, tickets: Sequence[Ticket]) -> None:
        """Record that operations run on a range until `tickets` are ready, also under its next owner."""
        self._expected.append((start, start + size, tickets))

    def waits(self, start: int, size: int) -> Sequence[Ticket]:
        """Return the tickets after which a new owner of a range may use it."""
        if not self._expected:
            return ()
        self._expected = [item for item in self._expected if not all(ticket.ready() for ticket in item[2])]
        end = start + size
        found = [tickets for begin, until, tickets in self._expected if begin < end and start < until]
        return [ticket for tickets in found for ticket in tickets if not ticket.ready()]

    def idle(self) -> bool:
        """Return whether no range is taken and no operation runs on the memory."""
        self.waits(0, 0)
        return not self._extents.end and not self._expected


class Range:
    """Memory that `Arena.take` gave to an owner.

    Attributes
    ----------
    memory : 1-d uint8 of exactly the requested length, at a multiple of 64 bytes
    after : operations that may still use the memory; the owner orders its first operation after them
    freed : whether it was given back
    """

    __slots__ = ("after", "freed", "memory", "segment", "size", "start")

    def __init__(self, memory: torch.Tensor, after: Sequence[Ticket], segment: Segment, start: int, size: int) -> None:
        self.memory = memory
        self.freed = False
        self.after = after
        self.segment = segment
        self.start = start
        self.size = size


class Arena:
    """Host memory that a device copies from and to without waiting. Thread-safe; `free` is safe in finalizers.

    The way of a range back:

    1. `free` only queues it, since a finalizer may call `free` on the thread that holds the lock;
    2. while operations of the device still use it, it waits in limbo, oldest first;
    3. when they are complete it is free, and merges with its neighbors;
    4. before the arena grows, it gives ranges in limbo out early: their tickets go to the next owner in `Range.after`.

    While a step makes a large arena grow, a thread pins the next segment; what the step does not need is unpinned.

    Parameters
    ----------
    most_nbytes : limit of the bytes of all segments, rounded up to whole pages; None for no limit

    Attributes
    ----------
    pinned : whether new memory is pinned; False once the system has refused it
    nbytes : bytes of all segments
    """

    def __init__(self, device: Device, most_nbytes: int | None = None) -> None:
        self.pinned = True
        self.nbytes = 0
        self._device = device
        self._most_nbytes = None if most_nbytes is None else _pages(most_nbytes)
        self._closed = False
        self._lock = Lock()
        self._back = Reaper[tuple[Range, list[Ticket]]](self._lock, self._receive)
        self._segments: list[Segment] = []  # the small ones first, so that a rare large one becomes idle
        self._limbo: deque[tuple[Range, list[Ticket]]] = deque()
        self._used_nbytes = 0  # in the hands of owners
        self._busy_nbytes = 0  # and in limbo
        self._needs = deque([0], IDLE_STEPS)  # peaks of busy bytes in the last steps and in this one
        self._before_nbytes = 0  # of all segments when the step began
        self._threads: Workers | None = None
        self._ahead: Job[torch.Tensor | None] | None = None  # the next segment, which a thread pins
        self._pins_ahead = True  # until that fails

    @property
    def used_nbytes(self) -> int:
        """Bytes that owners hold, rounded up as they are reserved."""
        self._back.drain()
        return self._used_nbytes

    def take(self, nbytes: int) -> Range | None:
        """Take uninitialized memory; None when `most_nbytes` is reached.

        Raises
        ------
        StateError : the arena is closed
        """
        size = room(nbytes)
        with self._lock:
            if self._closed:
                raise StateError("this memory was returned when its store was closed. Make a new ActivationStore.")
            self._back.drain_locked()
            while self._limbo and _all_ready(self._limbo[0][1]):
                self._land(*self._limbo[0])
                self._limbo.popleft()
            found = self._fit(size) or self._fit_early(size) or self._fit_grown(size)
            if found is None:
                return None
            segment, start = found
            self._used_nbytes += size
            self._busy_nbytes += size
            self._needs[-1] = max(self._needs[-1], self._busy_nbytes)
            return Range(segment.memory[start : start + nbytes], segment.waits(start, size), segment, start, size)

    def free(self, taken: Range, after: Iterable[Ticket] = ()) -> None:
        """Take a range back, which operations may still use until all of `after` are complete."""
        item = taken, list(after)
        if not taken.freed:
            taken.freed = True  # an interrupt comes after a call: both lines, or neither
            self._back.put(item)
        if self._closed:
            self._back.try_drain()

    def trim(self) -> None:
        """Begin a new step: return whole segments that the last IDLE_STEPS steps did not need."""
        with self._lock:
            self._back.drain_locked()
            self._settle()
            if self._ahead is not None and self._ahead.done() and (unused := self._pinned_ahead()):
                self._return(unused)
            most = SEGMENT_NBYTES + 2 * max(self._needs)
            for segment in reversed(self._segments):  # the largest first
                if segment.idle() and (segment.unused_steps >= IDLE_STEPS or self.nbytes > most):
                    self._return(segment)
            for segment in self._segments:
                segment.unused_steps += 1
            self._needs.append(self._busy_nbytes)
            self._before_nbytes = self.nbytes

    def close(self) -> None:
        """Return all segments. The caller has made sure that no operation runs on any of them."""
        with self._lock:
            self._closed = True
            self._limbo.clear()
            self._pinned_ahead()
            if self._threads is not None:
                self._threads.shutdown()
            for segment in self._segments[::-1]:
                self._return(segment)
            self._back.drain_locked()

    def _fit(self, size: int) -> tuple[Segment, int] | None:
        for segment in self._segments:
            start = segment.take(size)
            if start is not None:
                return segment, start
        return None

    def _fit_early(self, size: int) -> tuple[Segment, int] | None:
        """Find room among the ranges in limbo: first all that are complete by now, then as few more as possible."""
        if not self._limbo:
            return None
        found = self._fit(size) if self._settle() else None
        while found is None and self._limbo:
            taken, tickets = self._limbo[0]
            taken.segment.expect(taken.start, taken.size, tickets)
            self._land(taken, tickets)
            self._limbo.popleft()
            found = self._fit(size)
        return found

    def _fit_grown(self, size: int) -> tuple[Segment, int] | None:
        if self._pinned_ahead() and (found := self._fit(size)):
            self._pin_ahead()
            return found
        wanted = _pages(max(size, SEGMENT_NBYTES, self.nbytes // GROWTH_DIVISOR))
        if self._most_nbytes is not None:
            idle = [segment for segment in self._segments if segment.idle()]  # each too small by itself
            if self.nbytes - sum(segment.nbytes for segment in idle) + size > self._most_nbytes:
                return None
            while self.nbytes + size > self._most_nbytes:
                self._return(idle.pop())
            wanted = min(wanted, self._most_nbytes - self.nbytes)
        segment = self._add(Segment(*self._allocate(wanted)))
        start = segment.take(size)
        assert start is not None
        self._pin_ahead()
        return segment, start

    def _add(self, segment: Segment) -> Segment:
        self._ahead = None  # no call until all is noted: an interrupt (Ctrl-C) comes after one
        self._segments += (segment,)
        self.nbytes += segment.nbytes
        self._segments.sort(key=lambda segment: segment.nbytes)
        return segment

    def _pin_ahead(self) -> None:
        """Make a thread pin the next segment, where this step has made a large arena grow."""
        wanted = _pages(max(SEGMENT_NBYTES, self.nbytes // GROWTH_DIVISOR))
        fits = self._most_nbytes is None or self.nbytes + wanted <= self._most_nbytes
        grows = AHEAD_DIVISOR * (self.nbytes - self._before_nbytes) >= self.nbytes >= AHEAD_NBYTES
        if not (fits and grows and self.pinned and self._pins_ahead):
            return
        try:
            self._threads = self._threads or self._device.workers(1, "actstore-pin")
            self._ahead = self._threads.submit(self._device.pinned, wanted)
        except RuntimeError:  # a system without threads, and a forked child
            self._pins_ahead = False

    def _pinned_ahead(self) -> Segment | None:
        """Wait for the segment that a thread pins, and add it. Returns None where no thread pins one, or it has failed.

        After a failure there the arena pins only what it needs, and tells the error of that.
        """
        if self._ahead is None:
            return None
        failed = self._ahead.exception() is not None
        memory = None if failed else self._ahead.result()
        if memory is not None:
            return self._add(Segment(memory, True))
        self._ahead, self._pins_ahead = None, False
        return None

    def _allocate(self, nbytes: int) -> tuple[torch.Tensor, bool]:
        if self.pinned:
            memory = self._device.pinned(nbytes)
            if memory is not None:
                return memory, True
            self.pinned = False
            warnings.warn(
                f"the system refused {format_nbytes(nbytes)} of pinned memory. Pageable memory is used from now on: "
                "copies no longer overlap with compute. Raise the limit of locked memory (ulimit -l) or give "
                "Host(budget) a smaller value.",
                RuntimeWarning,
                stacklevel=2,
            )
        return torch.frombuffer(map_pages(nbytes), dtype=torch.uint8), False

    def _return(self, segment: Segment) -> None:
        self._segments.remove(segment)
        self.nbytes -= segment.nbytes
        if segment.pinned:
            self._device.unpin(segment.memory)

    def _receive(self, item: tuple[Range, list[Ticket]]) -> None:
        taken, tickets = item
        tickets = [ticket for ticket in tickets if not ticket.ready()]
        if tickets and not self._closed:
            self._limbo += ((taken, tickets),)  # no call: an interrupt (Ctrl-C) would come after it, and before the end
        elif not self._closed:
            self._land(taken, tickets)
        self._used_nbytes -= taken.size

    def _settle(self) -> bool:
        """Free the ranges whose operations are complete. Return whether any was."""
        i, before = 0, len(self._limbo)
        while i < len(self._limbo):
            taken, tickets = self._limbo[i]
            if _all_ready(tickets):
                self._land(taken, tickets)
                del self._limbo[i]
            else:
                i += 1
        return i < before

    def _land(self, taken: Range, tickets: list[Ticket]) -> None:
        taken.segment.give(taken.start, taken.size)
        self._busy_nbytes -= taken.size


def room(nbytes: int) -> int:
    """Return the bytes that a range of `nbytes` takes."""
    return round_up(max(1, nbytes), ALIGN_NBYTES)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _all_ready(tickets: Iterable[Ticket]) -> bool:
    return all(ticket.ready() for ticket in tickets)
