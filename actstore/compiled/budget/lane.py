"""The way of saved tensors to a tier and back: the time that it adds to a step, and the bytes that wait on the device.

Copies run one after the other beside the operators. In forward a tensor leaves behind the last operator that reads it,
as soon as the window has room. In backward the payloads come back in the order in which they are read, as far ahead as
the window admits.

On a CPU the threads that copy are Python's, and so is the lock that the loops of a compiler hold while they run: a copy
begins with the next operator that is not a loop, or when the step waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

CALL_MS = 0.1  # of a put or a read, in the host's code
SLACK_NBYTES = 1 << 16  # of the buffers over the payloads in them
MIN_NBYTES = 1 << 20  # smaller payloads would share buffers


class Payloads(NamedTuple):
    """The payloads that move in one graph, and the graph.

    Attributes
    ----------
    places : position of the operator behind which each leaves, or before which each is read, and its bytes, in order
    times : ms of the operators
    opens : whether a copy may begin while the operator runs
    """

    places: Sequence[tuple[int, int]]
    times: Sequence[float]
    opens: Sequence[bool]

    def begins(self) -> list[float]:
        """Return the time at which each operator begins, and the end."""
        return [0.0, *accumulate(self.times)]

    def openings(self) -> list[float]:
        """Return the time from which on a copy may begin that is queued before an operator, or at the end."""
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
    after_ms : time for which copies go on behind the graph
    """

    ms: list[float]
    waiting: list[int]
    after_ms: float = 0.0


class _Copies:
    """Copies in one direction, in their order. Each begins behind the last one, and not before it may."""

    def __init__(self, rate: float, free: float = 0.0) -> None:
        self._rate = rate
        self.free = free  # end of the last one that is known
        self.queue = deque[tuple[float, int]]()  # when each may begin, and its bytes

    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.queue)

    def take(self, now: float) -> float:
        """Return the end of the first one. Where that is later, the step waits from `now` on, and so all may begin."""
        begin, nbytes = self.queue.popleft()
        if max(self.free, begin) + nbytes / self._rate > now:
            begin = min(begin, now)
            self.queue = deque((min(other, now), size) for other, size in self.queue)
        self.free = max(self.free, begin) + nbytes / self._rate
        return self.free

    def drain(self, now: float) -> None:
        """Forget those that have ended."""
        while self.queue and max(self.free, self.queue[0][0]) + self.queue[0][1] / self._rate <= now:
            self.take(now)

    def shift(self, now: float, ms: float) -> None:
        """Let those that have not begun wait longer: the step itself takes longer from `now` on."""
        self.queue = deque((begin + ms if begin > now else begin, size) for begin, size in self.queue)


@dataclass(frozen=True)
class TierLane:
    """A tier, with the rates of the way to it in bytes per millisecond.

    Attributes
    ----------
    tier : its name in policies
    limit : most bytes in it
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
            copies.drain(now)
            while copies.queue and copies.nbytes() + nbytes > window:
                now = max(now, copies.take(asked))
            now += CALL_MS + nbytes / self.copy
            late += now - asked
            copies.shift(asked, now - asked)
            copies.queue.append((openings[position + 1] + late, nbytes))
            added[position] += now - asked
            gone[position] += nbytes
        end = begins[-1] + late
        while copies.queue:
            copies.take(end)
        return Moved(added, self._waiting(accumulate(gone), payloads, window), max(0.0, copies.free - end))

    def come(self, payloads: Payloads, window: int, busy_ms: float) -> Moved:
        """Return what payloads add to backward.

        busy_ms : time for which copies out go on in backward
        """
        begins, openings = payloads.begins(), payloads.openings()
        added, read = [0.0] * len(payloads.times), [0] * len(payloads.times)
        copies, late, sizes = _Copies(self.back, busy_ms if self.on_host else 0.0), 0.0, [n for _, n in payloads.places]
        queued = 0  # payloads whose copy has been asked for
        arrivals: list[float] = []
        for number, (position, nbytes) in enumerate(((0, 0), *payloads.places)):  # the first one begins the graph
            asked = begins[position] + late
            while queued < len(sizes):
                waiting = sum(sizes[number:queued])
                if waiting and waiting + sizes[queued] > window:
                    break
                copies.queue.append((openings[position] + late, sizes[queued]))
                queued += 1
            if number:
                while len(arrivals) < number:
                    arrivals.append(copies.take(asked))
                now = max(asked, arrivals[number - 1]) + CALL_MS + (0.0 if self.on_host else nbytes / self.copy)
                added[position] += now - asked
                late += now - asked
                copies.shift(asked, now - asked)
            read[position] += nbytes
        total = sum(sizes)
        return Moved(added, self._waiting((total - nbytes for nbytes in accumulate(read)), payloads, window))

    def buffers(self, payloads: Iterable[int], window: int) -> Callable[[int], int]:
        """Return a function: the bytes in buffers while so many bytes of payloads are on their way, or about to be.

        payloads : the bytes of each that moves in a step
        """
        sizes = [*payloads]
        most = max(window, *sizes) * (1 if self.on_host else 2) + SLACK_NBYTES if sizes else 0
        if self.recycles or not sizes:
            return lambda nbytes: min(most, nbytes)
        idle = min(most, sum(sizes)) + max(sizes)
        return lambda nbytes: idle

    def _waiting(self, moving: Iterable[int], payloads: Payloads, window: int) -> list[int]:
        return list(map(self.buffers((nbytes for _, nbytes in payloads.places), window), moving))
