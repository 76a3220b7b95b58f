"""Which inputs of a chain of recomputed calls are stored, and which come to exist again as backward replays it.

Positions count the calls of a chain from 0. The inputs of call 0 come from outside and are always stored; those of the
last call so far are live, and not these schedules' concern.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import ceil, isqrt

from actstore.plan.solver.revolve import fewest_slots, positions
from actstore.policy import Recompute


class Segments:
    """Stores the inputs of every `length`-th call; backward keeps all inputs of the segment that it is in.

    Parameters
    ----------
    length : calls of a segment; None for the square root of the number of calls so far, which stores about twice as
        many inputs as the square root of their number in the end
    """

    def __init__(self, length: int | None) -> None:
        self.stored = [0]  # positions, ascending
        self._length = length

    def arrive(self, position: int) -> tuple[bool, Iterable[int]]:
        """A call arrives: whether its inputs are stored, and the stored positions that are given up for it."""
        length = self._length or isqrt(position - 1) + 1
        wanted = position - self.stored[-1] >= length
        if wanted:
            self.stored.append(position)
        return wanted, ()

    def keep(self, runs: int, first: int, kept: int) -> Iterable[int]:
        """Before which of `runs` calls that are replayed their inputs are kept: indices, ascending, 0 left out.

        Parameters
        ----------
        runs : calls from the last stored input up to the call whose input is wanted, that one excluded
        first : position of the first of them
        kept : inputs before `first` that backward has kept
        """
        return range(1, runs)


class Revolve:
    """At most `slots` inputs exist at once, at the positions that cost the fewest forwards.

    For chains of a known length these are those of `plan.revolve`. Beyond that length, inputs are stored at a spacing,
    and when the slots are full every other one is given up and the spacing doubles: between half of the slots and all
    of them are in use at the end.

    Parameters
    ----------
    slots : 1 or more; None for the fewest that keep replays below two forwards for each call
    expected : calls, where known; otherwise 1
    """

    def __init__(self, slots: int | None, expected: int) -> None:
        self.stored = [0]
        self._auto = slots is None
        self._slots = fewest_slots(expected) if slots is None else slots
        self._expected = expected
        self._planned = frozenset(positions(expected, self._slots))
        self._spacing = ceil(expected / self._slots)

    def arrive(self, position: int) -> tuple[bool, Iterable[int]]:
        """As of `Segments`."""
        given_up: list[int] = []
        if position < self._expected:
            wanted = position in self._planned
        else:
            if self._auto:
                self._slots = max(self._slots, fewest_slots(position + 1))
            if position - self.stored[-1] >= self._spacing and len(self.stored) >= self._slots:
                given_up, self.stored = self.stored[1::2], self.stored[::2]
                self._spacing *= 2
            wanted = position - self.stored[-1] >= self._spacing and len(self.stored) < self._slots
        if wanted:
            self.stored.append(position)
        return wanted, given_up

    def keep(self, runs: int, first: int, kept: int) -> Iterable[int]:
        """As of `Segments`: what is stored behind `first` was for calls that backward is done with, or will be freed
        with their part of the graph, so that its slots are free."""
        return positions(runs + 1, max(1, self._slots - bisect_left(self.stored, first) - kept))


Schedule = Segments | Revolve


def schedule_of(decision: Recompute, expected: int) -> Schedule:
    """A schedule for one chain of `expected` calls; 1 where that is not known."""
    if decision.schedule is None:
        return Segments(decision.segment)
    if decision.schedule == "sqrt":
        return Segments(ceil(expected**0.5) if expected > 1 else None)
    return Revolve(decision.slots, expected)
