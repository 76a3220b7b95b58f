"""Discrete events on lanes: a lane does one thing at a time, at a rate that depends on which other lanes are busy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf


@dataclass(eq=False)
class Pool:
    """Rate that several lanes share: the busy ones have equal parts."""

    rate: float = inf
    busy: int = 0
    lanes: list[Lane] = field(default_factory=list)


class Lane:
    """Lane that does one amount of work at a time, in milliseconds of compute or in bytes.

    Parameters
    ----------
    clock : its time
    rate : amount per millisecond, alone
    pool : rate that it shares with other lanes
    """

    def __init__(self, clock: Clock, rate: float = 1.0, pool: Pool | None = None) -> None:
        self.clock = clock
        self.rate = rate
        self.pool = pool
        self.busy = False
        self.busy_ms = 0.0
        self.done: Callable[[], None] | None = None
        self.left = 0.0  # remaining amount, at `since`
        self.since = 0.0
        self.speed = 0.0  # from `since` on
        self.began = 0.0
        self.version = 0  # number of the last predicted end
        self._rivals: tuple[Lane, ...] = ()
        self._factor = 1.0
        self._dependents: list[Lane] = []  # lanes whose speed changes when this lane begins or ends
        if pool is not None:
            pool.lanes.append(self)

    def slowed_by(self, rivals: tuple[Lane, ...], factor: float) -> None:
        """Run at `factor` of the rate while any of the rivals is busy."""
        if factor != 1:
            self._rivals, self._factor = rivals, factor
            for rival in rivals:
                rival._dependents.append(self)

    def allowed(self) -> float:
        """Return the speed that the busy lanes leave to this one now."""
        speed = self.rate
        if self.pool is not None:
            speed = min(speed, self.pool.rate / self.pool.busy)
        if any(rival.busy for rival in self._rivals):
            speed *= self._factor
        return speed

    def affected(self) -> list[Lane]:
        """Return the lanes whose speed may change when this one begins or ends."""
        shared = self.pool.lanes if self.pool is not None and self.pool.rate < inf else [self]
        return [*shared, *self._dependents]


class Clock:
    """Time, and the ends of work. Deterministic: of simultaneous ends, the one that was predicted first comes first.

    Attributes
    ----------
    now : ms
    events : number of pieces of work that have ended
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, int, Lane]] = []
        self._foreseen = 0
        self._changed: list[Lane] = []

    def start(self, lane: Lane, amount: float, done: Callable[[], None]) -> None:
        """Begin work on an idle lane; call `done` when it has ended, which may start other work."""
        lane.busy, lane.left, lane.done = True, amount, done
        lane.since = lane.began = self.now
        lane.speed = 0.0
        if lane.pool is not None:
            lane.pool.busy += 1
        self._changed.append(lane)

    def run(self) -> None:
        """Let time pass until all work has ended."""
        self._adjust()
        while self._heap:
            time, _, version, lane = heappop(self._heap)
            if version != lane.version or not lane.busy:
                continue  # a prediction from before a change of speed
            self.now = time
            self.events += 1
            lane.busy = False
            lane.busy_ms += time - lane.began
            if lane.pool is not None:
                lane.pool.busy -= 1
            self._changed.append(lane)
            assert lane.done is not None
            lane.done()
            self._adjust()

    def _adjust(self) -> None:
        """Predict the ends of all work whose speed has changed again."""
        for lane in {lane: None for changed in self._changed for lane in (changed, *changed.affected())}:
            if not lane.busy:
                continue
            speed = lane.allowed()
            if speed == lane.speed:
                continue
            if self.now > lane.since:
                lane.left = max(0.0, lane.left - lane.speed * (self.now - lane.since))
                lane.since = self.now
            lane.speed = speed
            lane.version += 1
            self._foreseen += 1
            heappush(self._heap, (self.now + lane.left / speed, self._foreseen, lane.version, lane))
        self._changed.clear()
