"""Tiers of a dry step, and the clock by which their copies end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from actstore.base.ticket import DONE, Done, Span, Ticket
from actstore.devices import Cpu, cpu_memory
from actstore.inspection.fit.memory import LiveMemory
from actstore.inspection.fit.work import Work
from actstore.tiers import Slot, Tier

SLOW_NS = 1_000  # for a byte: a copy on a slow tier ends when the host waits for it, or for a later one


class DryClock:
    """The time of a dry step, which waits for copies alone make pass.

    Attributes
    ----------
    now_ns : the time since the clock was made
    """

    def __init__(self) -> None:
        self.now_ns = 0

    def wait_until(self, ns: int) -> None:
        """Let time pass until a moment, unless it is over."""
        self.now_ns = max(ns, self.now_ns)


class DryDevice(Cpu):
    """A CPU with memory that no one touches, whose host waits by a `DryClock`.

    Parameters
    ----------
    stands_for_cpu : whether the step would train on a CPU, whose freed buffers serve tensors
    """

    def __init__(self, device: torch.device, memory: LiveMemory, clock: DryClock, *, stands_for_cpu: bool) -> None:
        super().__init__(device)
        self._memory = memory
        self._clock = clock
        self._stands_for_cpu = stands_for_cpu
        cpu_memory.install()

    def recycles(self, nbytes: int) -> bool:
        return self._stands_for_cpu and super().recycles(nbytes)

    def empty(self, nbytes: int) -> Tensor:
        return self._memory.buffer(nbytes) if nbytes else super().empty(nbytes)

    def wait(self, stream: Any, ticket: Ticket) -> Ticket | None:
        if ticket.ready():
            return None
        begin = self._clock.now_ns
        ticket.wait_on(stream)
        return Done((begin, self._clock.now_ns))


class DryTier(Tier):
    """A tier without memory or a file, whose copies end at once; on a slow one, one after the other on each way.

    Parameters
    ----------
    work : counts the copies; None for no times
    on_stream : whether a stream waits for the copies, never the host

    Attributes
    ----------
    is_used : whether a payload has gone there
    """

    def __init__(self, name: str, clock: DryClock, work: Work | None, *, is_slow: bool, on_stream: bool) -> None:
        self.name = name  # type: ignore[misc]  # of the tier for which it stands
        self.is_used = False
        self._clock = clock
        self._work = work
        self._byte_ns = SLOW_NS if is_slow else 0
        self._kind = _StreamCopy if on_stream else _DryCopy
        self._free_ns = [0, 0]  # when the last copy of each way ends

    def reserve(self, nbytes: int) -> Slot | None:
        return Slot(nbytes)

    def write(self, slot: Slot, src: Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        self.is_used = True
        slot.written = slot.place = self._copy(slot.nbytes, 0, back=False)
        return slot.written

    def read(self, slot: Slot, dst: Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        written = slot.place
        return self._copy(slot.nbytes, written.end_ns if isinstance(written, _DryCopy) else 0, back=True)

    def free(self, slot: Slot) -> None:
        """Do nothing: a slot takes no room here."""

    def trim(self) -> None:
        """Do nothing: no memory is idle."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _copy(self, nbytes: int, earliest_ns: int, *, back: bool) -> Ticket:
        if self._work is not None:
            self._work.copy(self.name, nbytes, back=back)
        begin = max(self._clock.now_ns, self._free_ns[back], earliest_ns)
        end = self._free_ns[back] = begin + nbytes * self._byte_ns
        return self._kind(self._clock, begin, end) if end > begin else DONE


class _DryCopy(Ticket):
    """A copy that ends at a moment of the clock."""

    def __init__(self, clock: DryClock, begin_ns: int, end_ns: int) -> None:
        self._clock = clock
        self._begin_ns = begin_ns
        self.end_ns = end_ns

    def ready(self) -> bool:
        return self._clock.now_ns >= self.end_ns

    def wait_on(self, stream: Any) -> None:
        self._clock.wait_until(self.end_ns)

    def result(self) -> None:
        self._clock.wait_until(self.end_ns)

    def span(self) -> Span | None:
        return (self._begin_ns, self.end_ns) if self.ready() else None


class _StreamCopy(_DryCopy):
    """A copy that a stream waits for."""

    on_stream = True
