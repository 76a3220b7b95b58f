"""Vector clocks, and the checker that finds conflicting accesses which nothing orders."""

from __future__ import annotations

from dataclasses import dataclass

Clock = dict[int, int]  # by agent, how much of its work is known to have happened

MOST_RACES = 20  # one mistake shows at many places


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` know what `other` knows."""
    for agent, time in other.items():
        if clock.get(agent, 0) < time:
            clock[agent] = time


@dataclass(frozen=True, slots=True)
class Access:
    """A read or a write of the bytes from `lo` up to `hi`, the agent's `time`-th event."""

    lo: int
    hi: int
    write: bool
    agent: int
    time: int
    what: str

    def __str__(self) -> str:
        return f"{'write' if self.write else 'read'} by {self.what}"


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes, at least one a write, that no event orders; or one to memory that is gone."""

    first: Access
    second: Access
    base: int

    def __str__(self) -> str:
        lo, hi = max(self.first.lo, self.second.lo) - self.base, min(self.first.hi, self.second.hi) - self.base
        return f"bytes {lo} to {hi} of an allocation: nothing orders the {self.first} before the {self.second}"


class Checker:
    """Knows the accesses to each allocation that a later one may still conflict with.

    The clock of an operation is known when it is enqueued, so that accesses are recorded in the order in which the
    host asked for them, whenever they run: an access can come after those recorded before it, never before them.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._live: dict[int, list[Access]] = {}  # by the address of the allocation

    def access(self, base: int, lo: int, hi: int, write: bool, agent: int, clock: Clock, what: str) -> None:
        """Record an access by `agent`, who knows `clock`, to bytes of the allocation at `base`."""
        new = Access(lo, hi, write, agent, clock[agent], what)
        live = []
        for old in self._live.get(base, ()):
            if old.lo < hi and lo < old.hi:
                if old.time <= clock.get(old.agent, 0):
                    if lo <= old.lo and old.hi <= hi and (write or not old.write):
                        continue  # who is not ordered after the old one is not ordered after the new one either
                elif (write or old.write) and len(self.races) < MOST_RACES:
                    self.races.append(Race(old, new, base))
            live.append(old)
        live.append(new)
        self._live[base] = live

    def forget(self, base: int) -> None:
        """The address will belong to something else."""
        self._live.pop(base, None)

    def live(self, base: int) -> int:
        """How many accesses to an allocation are remembered."""
        return len(self._live.get(base, ()))
