"""Timelines of many choices at once, each a few changes away from one base: the moves of a local search.

The same recurrence as in `timeline`, with one numpy operation for all candidates. Both halves run from the first layer
to the last, so that a candidate joins at its first change, with the state of the base there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from actstore.plan.solver.tables import BACKWARD, FORWARD, Floats, Tables, slack

Change = tuple[int, int]  # layer, option
Move = tuple[Change, ...]  # of different layers, in the order of layers


@dataclass(frozen=True, slots=True)
class Scores:
    """Time and breach of each candidate.

    Attributes
    ----------
    total : ms of a step, computed as if every exceeded limit had room
    breach : excess over limits, each as a fraction of its limit, summed; zero where all hold
    """

    total: Floats
    breach: Floats


def scores(tables: Tables, base: Sequence[int], moves: Sequence[Move]) -> Scores:
    """Evaluate `base` with each of `moves` applied. O(layers) numpy operations on arrays of `len(moves)`."""
    return _Batch(tables, base, moves).scores()


class _Batch:
    def __init__(self, tables: Tables, base: Sequence[int], moves: Sequence[Move]) -> None:
        self.tables = tables
        layers = np.arange(len(base))
        self.base = np.asarray(base, dtype=np.intp)
        self.order = np.array(sorted(range(len(moves)), key=lambda m: moves[m][0][0]), dtype=np.intp)
        changes = [(moves[m][k], row) for row, m in enumerate(self.order) for k in range(len(moves[m]))]
        changes.sort(key=lambda change: change[0][0])
        self.at = np.array([layer for (layer, _), _ in changes], dtype=np.intp)
        self.to = np.array([option for (_, option), _ in changes], dtype=np.intp)
        self.rows = np.array([row for _, row in changes], dtype=np.intp)
        self.first = np.searchsorted(self.at, layers), np.searchsorted(self.at, layers, side="right")
        starts = np.array([moves[m][0][0] for m in self.order], dtype=np.intp)
        self.joined = np.searchsorted(starts, layers, side="right")
        # where candidates have unequal room in host memory, they cannot start from a state of the base
        self.shared_room = not tables.two_lanes or not isfinite(tables.limits.host)

    def scores(self) -> Scores:
        tables, limits = self.tables, self.tables.limits
        added = self._sum(tables.extra[FORWARD] + tables.extra[BACKWARD])
        host = self._sum(tables.host)
        breach = np.zeros(len(self.order))
        for limit, needed in (
            (limits.host, host),
            (limits.disk, self._sum(tables.disk)),
            (limits.error, self._sum(tables.error)),
        ):
            breach += _excess(needed - limit, limit)
        total = tables.plain + added
        over = np.zeros(len(self.order))
        crossing = np.full(len(self.order), inf)
        for direction in (FORWARD, BACKWARD):
            waits, drain, most = self._half(direction, np.maximum(0.0, limits.host - host))
            total += waits + drain
            np.minimum(crossing, drain, out=crossing)
            np.maximum(over, most, out=over)
        total += tables.crossing * crossing
        breach += _excess(over, limits.device)
        back = np.empty_like(self.order)
        back[self.order] = np.arange(len(self.order))
        return Scores(total[back], breach[back])

    def _sum(self, table: Floats) -> Floats:
        """Return the sum over the layers, for each candidate."""
        own = table[np.arange(len(self.base)), self.base]
        change = table[self.at, self.to] - own[self.at]
        return np.asarray(own.sum() + np.bincount(self.rows, change, minlength=len(self.order)), dtype=np.float64)

    def _half(self, direction: int, room: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the waits and the drain of one direction, and the most bytes over the device limit."""
        tables, size = self.tables, len(self.order)
        near_rate, far_rate, limit = tables.near_rate[direction], tables.far_rate[direction], tables.limits.device
        two = tables.two_lanes
        columns = [
            self._column(table)
            for table in (tables.peak[direction], tables.extra[direction], tables.held, tables.near, tables.far)
        ]
        held, queued, undelivered, waits, over = (np.zeros(size) for _ in range(5))
        state = np.zeros(5)
        count = size if not self.shared_room else 0
        for i, (time, joined) in enumerate(zip(tables.compute[direction], self.joined, strict=True)):
            if joined > count:
                for array, value in zip((held, queued, undelivered, waits, over), state, strict=True):
                    array[count:joined] = value
                count = int(joined)
            if count < size:
                state = self._step(direction, i, state, limit)
            if count == 0:
                continue
            peak, extra, hold, near, far = (self._values(column, i, count) for column in columns)
            h, q, r = held[:count], queued[:count], room[:count]
            free = limit - peak - h
            np.maximum(over[:count], -free, out=over[:count])
            np.maximum(free, 0.0, out=free)
            stall = np.maximum((q - free) / near_rate, 0.0)
            if two:
                u = undelivered[:count]
                np.maximum(stall, (u - r - free) / far_rate, out=stall)
                np.maximum(u - far_rate * (stall + time + extra), 0.0, out=u)
                np.maximum(q - near_rate * (stall + time + extra), u - r, out=q)
                np.maximum(q, 0.0, out=q)
                u += far
            else:
                np.maximum(q - near_rate * (stall + time + extra), 0.0, out=q)
            waits[:count] += stall
            q += near
            h += hold
        return waits, np.maximum(queued / near_rate, undelivered / far_rate), over

    def _step(self, direction: int, i: int, state: Floats, limit: float) -> Floats:
        """Return the state of the base after layer `i`: held, queued, undelivered, waits, bytes over the limit."""
        tables, o = self.tables, self.base[i]
        held, queued, undelivered, waits, over = state
        near_rate, far_rate = tables.near_rate[direction], tables.far_rate[direction]
        free = limit - tables.peak[direction][i, o] - held
        over, free = max(over, -free), max(free, 0.0)
        stall = max(0.0, (queued - free) / near_rate)
        elapsed = stall + tables.compute[direction][i] + tables.extra[direction][i, o]
        undelivered = max(0.0, undelivered - far_rate * elapsed) + tables.far[i, o]
        queued = max(0.0, queued - near_rate * elapsed) + tables.near[i, o]
        return np.array([held + tables.held[i, o], queued, undelivered, waits + stall, over])

    def _column(self, table: Floats) -> tuple[Floats, Floats]:
        """Return a table's values of the base by layer, and those of the changes."""
        return table[np.arange(len(self.base)), self.base], table[self.at, self.to]

    def _values(self, column: tuple[Floats, Floats], i: int, count: int) -> Floats | np.float64:
        """Return a table's values at layer `i`: one for all candidates, or one each where some change there."""
        own, changed = column
        start, end = self.first[0][i], self.first[1][i]
        if start == end:
            return np.float64(own[i])
        values = np.full(count, own[i])
        values[self.rows[start:end]] = changed[start:end]
        return values


def _excess(over: NDArray[np.float64], limit: float) -> Floats:
    """Return the bytes over a limit as a fraction of it; zero within the limit's slack."""
    if limit == inf:
        return np.zeros_like(over)
    return np.where(over > slack(limit), over / max(limit, 1.0), 0.0)
