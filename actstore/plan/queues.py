"""The rows of one direction: what queues on the lanes, and how long compute waits."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from actstore.plan.program import Terms
from actstore.plan.tables import FAST

if TYPE_CHECKING:
    from actstore.plan.linear import Linear


class Half:
    """Writes the rows of one direction; `costs` says whether its waits count in the cost."""

    def __init__(self, program: Linear, direction: int, *, costs: bool) -> None:
        tables = program.tables
        self.program, self.direction, self.costs = program, direction, costs
        self.near_rate, self.far_rate = tables.near_rate[direction], tables.far_rate[direction]
        self.two = tables.two_lanes
        self.staged = self.two and "host" in program.limits

    def write(self) -> None:
        program, tables = self.program, self.program.tables
        d = e = -1
        for i in range(len(program.allowed)):
            s = program.waits(self.costs) if i else -1
            p = program.variable()
            self._drained(d, s, p, self.near_rate)
            if "device" in program.limits:
                program.memory_row(i, self.direction, [(p, 1.0)])
            time = tables.compute[self.direction][i], program.chosen(tables.extra[self.direction], i)
            near = program.chosen(tables.near, i, 1 / program.unit)
            d = self._queue(p, time, near, self.near_rate)
            if self.two:
                y = program.variable()
                self._drained(e, s, y, self.far_rate)
                far = program.chosen(tables.far, i, 1 / program.unit)
                e = self._queue(y, time, far, self.far_rate)
                if self.staged:
                    self._room(y, p, [])
                    self._room(e, d, [(v, x - f) for (v, x), (_, f) in zip(near, far, strict=True)])
        self._drain(d, e)

    def _drained(self, before: int, wait: int, after: int, rate: float) -> None:
        """after >= before - rate wait."""
        if before >= 0 and rate < FAST:
            terms = [(before, 1.0), (wait, -rate / self.program.unit), (after, -1.0)]
            self.program.row(terms, -inf, 0.0)

    def _queue(self, start: int, time: tuple[float, Terms], arriving: Terms, rate: float) -> int:
        """What queues at the end of a layer."""
        program = self.program
        end = program.variable()
        program.row([*arriving, (end, -1.0)], -inf, 0.0)
        if rate < FAST:
            rate /= program.unit
            computes = {v: -rate * x for v, x in time[1]}
            terms = [(v, x + computes[v]) for v, x in arriving]
            program.row([(start, 1.0), *terms, (end, -1.0)], -inf, rate * time[0])
        return end

    def _room(self, undelivered: int, queued: int, shift: Terms) -> None:
        """What is not on the disk, and not on the device, has room in host memory."""
        program = self.program
        terms = [(undelivered, 1.0), (queued, -1.0), *shift, (program.waiting, 1.0), (program.limits["host"], -1.0)]
        program.row(terms, -inf, 0.0)

    def _drain(self, d: int, e: int) -> None:
        program = self.program
        drain = program.waits(self.costs)
        for last, rate in ((d, self.near_rate), (e, self.far_rate)):
            if last >= 0 and rate < FAST:
                program.row([(last, program.unit / rate), (drain, -1.0)], -inf, 0.0)
