"""Schedules of chains of recomputed calls: the inputs to store, and those that backward replays.

Positions count the calls of a chain from 0. The inputs of call 0 come from outside and are always stored. Those of
the last call so far are live; schedules do not decide on them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import ceil, isqrt

from actstore.plan.solver.revolve import fewest_slots, positions
from actstore.policy import Recompute


class Segments:
    """A schedule that stores the inputs of every `length`-th call. Backward keeps all inputs of its current segment.

    Parameters
    ----------
    length : calls of a segment. None for the square root of the number of calls so far, which in the end stores about
        twice the square root of their number
    """

    def __init__(self, length: int | None) -> None:
        self.stored = [0]  # positions, ascending
        self._length = length

    def arrive(self, position: int) -> tuple[bool, Iterable[int]]:
        """Return whether the inputs of an arriving call are stored, and the stored positions that it displaces."""
        length = self._length or isqrt(position - 1) + 1
        wanted = position - self.stored[-1] >= length
        if wanted:
            self.stored.append(position)
        return wanted, ()

    def keep(self, runs: int, first: int, kept: int) -> Iterable[int]:
        """Return the replayed calls before which their inputs are kept: indices, ascending, without 0.

        Parameters
        ----------
        runs : number of calls from the last stored input up to the call whose input is needed, without that call
        first : position of the first of these calls
        kept : number of inputs before `first` that backward has kept
        """
        return range(1, runs)


class Revolve:
    """A schedule of at most `slots` inputs at once, at the positions that cost the fewest forwards.

    For a chain of the expected length, `plan.revolve` gives the positions. Beyond it, inputs are stored at a spacing.
    When the slots are full, every second input is given up and the spacing doubles. So between half of the slots and
    all of them are in use at the end.

    Parameters
    ----------
    slots : 1 or more; None for the fewest that keep replays below two forwards for each call
    expected : number of calls; 1 where it is unknown
    """

    def __init__(self, slots: int | None, expected: int) -> None:
        self.stored = [0]
        self._auto = slots is None
        self._slots = fewest_slots(expected) if slots is None else slots
        self._expected = expected
        self._planned = frozenset(positions(expected, self._slots))
        self._spacing = ceil(expected / self._slots)

    def arrive(self, position: int) -> tuple[bool, Iterable[int]]:
        """Decide as `Segments.arrive`."""
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
        """Return as `Segments.keep`. Slots after `first` are free: backward is done with their calls, or frees them
        with their part of the graph."""
        return positions(runs + 1, max(1, self._slots - bisect_left(self.stored, first) - kept))


Schedule = Segments | Revolve


def schedule_of(decision: Recompute, expected: int) -> Schedule:
    """Return a schedule for one chain of `expected` calls; 1 where that is unknown."""
    if decision.schedule is None:
        return Segments(decision.segment)
    if decision.schedule == "sqrt":
        return Segments(ceil(expected**0.5) if expected > 1 else None)
    return Revolve(decision.slots, expected)
