"""The way of saved tensors to a tier and back: the time that it adds to a step, and the bytes that wait on the device.

Copies run beside the operators, and share the rate of the tier. In forward a tensor leaves after the last operator
that reads it, as soon as the window has room. In backward the payloads come back in the order in which they are read,
as far ahead as the window admits.

On a CPU the threads that copy are Python's, and so is the lock that the loops of a compiler hold while they run: a copy
begins with the next operator that is not a loop, or when the step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

CALL_MS = 0.1  # of a put or a read, in the host's code
ROUNDING_NBYTES = 1e-3  # what is left of a copy by rounding alone is less
SLACK_NBYTES = 1 << 16  # of the buffers over the payloads in them
MIN_NBYTES = 1 << 20  # smaller payloads would share buffers


class Payloads(NamedTuple):
    """The payloads that move in one graph, and the graph.

    Attributes
    ----------
    places : position of the operator after which each leaves, or before which each is read, and its bytes, in order
    times : ms of the operators
    opens : whether a copy may start while the operator runs
    """

    places: Sequence[tuple[int, int]]
    times: Sequence[float]
    opens: Sequence[bool]

    def begins(self) -> list[float]:
        """Return the time at which each operator begins, and the end."""
        return [0.0, *accumulate(self.times)]

    def openings(self) -> list[float]:
        """Return the time from which on a copy may start that is queued before an operator, or at the end."""
        found = self.begins()
        for at in range(len(self.times) - 1, -1, -1):
            if not self.opens[at]:
                found[at] = found[at + 1]
        return found


class Moved(NamedTuple):
    """Time and bytes that copies add to one graph, by the position of the operator.

    Attributes
    ----------
    ms : time that they add
    waiting : bytes of payloads in the buffers of the engine
    after_ms : time for which copies go on after the graph
    """

    ms: list[float]
    waiting: list[int]
    after_ms: float = 0.0


@dataclass(eq=False)
class _CopyInFlight:
    """A copy in flight: its bytes, the bytes that are left, and the time from which on it may start."""

    nbytes: int
    left: float
    begin: float


class _Copies:
    """Copies in one direction, which start at `since` at the earliest. All that have started share the rate."""

    def __init__(self, rate: float, since: float = 0.0) -> None:
        self._rate = rate
        self._now = since
        self.running: list[_CopyInFlight] = []

    def add(self, nbytes: int, begin: float) -> _CopyInFlight:
        """Queue a copy that may start at a time."""
        copy = _CopyInFlight(nbytes, nbytes, begin)
        self.running.append(copy)
        return copy

    def run(self, until: float) -> None:
        """Go on until a time."""
        while self.running and self._now < until:
            self._step(until)
        self._now = max(self._now, until)

    def wait(self, copy: _CopyInFlight, now: float) -> float:
        """Return the end of a copy, or `now`. Where the step waits for it from `now` on, all may start meanwhile."""
        self.run(now)
        if copy in self.running:
            for other in self.running:
                other.begin = min(other.begin, now)
        while copy in self.running:
            self._step(inf)
        return max(now, self._now)

    def _step(self, until: float) -> None:
        """Go on until the next copy begins or ends."""
        begun = [copy for copy in self.running if copy.begin <= self._now]
        until = min([until, *(copy.begin for copy in self.running if copy.begin > self._now)])
        share = self._rate / max(1, len(begun))
        first = min(begun, key=lambda copy: copy.left, default=None)
        if first is not None and self._now + first.left / share <= until:
            until, nbytes = self._now + first.left / share, first.left
        else:
            nbytes = (until - self._now) * share
        for copy in begun:
            copy.left -= nbytes
        self.running = [copy for copy in self.running if copy.left > ROUNDING_NBYTES]
        self._now = until

    def shift(self, now: float, ms: float) -> None:
        """Let those that have not begun wait longer: the step itself takes longer from `now` on."""
        for copy in self.running:
            if copy.begin > now:
                copy.begin += ms


@dataclass(frozen=True)
class TierLane:
    """A tier, with the rates of the way to it in bytes per millisecond.

    Attributes
    ----------
    tier : its name in policies
    limit : upper bound of the bytes in it
    out, back : rates of copies
    copy : rate at which the compute device fills a buffer
    windows : bytes that may be on their way out, or wait for backward: a plan chooses one, the first is the smallest
    on_host : whether the compute device is a CPU: then bytes that leave make those that come back wait, and a buffer
        becomes the tensor that backward reads
    recycles : whether the memory of an idle buffer serves other tensors
    """

    tier: str
    limit: float
    out: float
    back: float
    copy: float
    windows: tuple[int, ...]
    on_host: bool
    recycles: bool

    def leave(self, payloads: Payloads, window: int) -> Moved:
        """Return what payloads add to forward."""
        begins, openings = payloads.begins(), payloads.openings()
        added, gone = [0.0] * len(payloads.times), [0] * len(payloads.times)
        copies, late = _Copies(self.out), 0.0
        for position, nbytes in payloads.places:
            asked = now = begins[position + 1] + late
            copies.run(now)
            while copies.running and sum(copy.nbytes for copy in copies.running) + nbytes > window:
                now = copies.wait(copies.running[0], now)
            now += CALL_MS + nbytes / self.copy
            late += now - asked
            copies.shift(asked, now - asked)
            copies.add(nbytes, openings[position + 1] + late)
            added[position] += now - asked
            gone[position] += nbytes
        end = now = begins[-1] + late
        while copies.running:
            now = copies.wait(copies.running[0], now)
        return Moved(added, self._waiting(accumulate(gone), payloads, window), now - end)

    def come(self, payloads: Payloads, window: int, busy_ms: float) -> Moved:
        """Return what payloads add to backward.

        busy_ms : time for which copies out go on in backward
        """
        begins, openings = payloads.begins(), payloads.openings()
        added, read = [0.0] * len(payloads.times), [0] * len(payloads.times)
        copies, late = _Copies(self.back, busy_ms if self.on_host else 0.0), 0.0
        sizes, queued = [nbytes for _, nbytes in payloads.places], list[_CopyInFlight]()
        for number, (position, nbytes) in enumerate(((0, 0), *payloads.places)):  # the first one begins the graph
            asked = now = begins[position] + late
            while len(queued) < len(sizes):
                waiting, more = sum(sizes[number : len(queued)]), sizes[len(queued)]
                if waiting and waiting + more > window:
                    break
                queued.append(copies.add(more, openings[position] + late))
            if number:
                now = copies.wait(queued[number - 1], now) + CALL_MS
                now += 0.0 if self.on_host else nbytes / self.copy
                added[position] += now - asked
                late += now - asked
                copies.shift(asked, now - asked)
            read[position] += nbytes
        total = sum(sizes)
        return Moved(added, self._waiting((total - nbytes for nbytes in accumulate(read)), payloads, window))

    def buffers(self, payloads: Iterable[int], window: int) -> Callable[[int], int]:
        """Return a function that takes the bytes of payloads in transit, or about to be, and returns those of buffers.

        payloads : the bytes of each payload that moves in a step
        """
        sizes = [*payloads]
        most = max(window, *sizes) * (1 if self.on_host else 2) + SLACK_NBYTES if sizes else 0
        if self.recycles or not sizes:
            return lambda nbytes: min(most, nbytes)
        idle = min(most, sum(sizes)) + max(sizes)
        return lambda nbytes: idle

    def _waiting(self, moving: Iterable[int], payloads: Payloads, window: int) -> list[int]:
        return list(map(self.buffers((nbytes for _, nbytes in payloads.places), window), moving))
