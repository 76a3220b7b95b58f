"""Local search on the timeline: from a choice to a better one, by moves of one, two or many layers.

Deterministic, unless it reaches its deadline. The search first repairs a choice that exceeds a limit, by the moves with
the least cost per byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from time import monotonic

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
        """Return the waits and the drain of one direction, and the largest excess over the device limit."""
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


PAIRED_CHANGES = 64  # changes: the search tries all pairs of them
MIN_GAIN_SHARE = 1e-9  # of the step
LANE_PRICES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the time a byte takes there
HELD_PRICES = (0.0, *(float(x) for x in np.geomspace(1e-3, 1e2, 40)))  # of what the dearest option pays for a byte


class Search:
    """Local search among the allowed options of each layer, until `deadline` (time.monotonic, s)."""

    def __init__(self, tables: Tables, allowed: Sequence[Sequence[int]], deadline: float) -> None:
        self.tables = tables
        self._allowed = allowed
        self._deadline = deadline
        self._least_gain = MIN_GAIN_SHARE * max(tables.plain, 1.0)

    @property
    def late(self) -> bool:
        """True after the deadline."""
        return monotonic() > self._deadline

    def improve(self, choice: Sequence[int]) -> tuple[list[int], float] | None:
        """Return a choice that keeps all limits and that no move improves, with its ms; None where none is found."""
        best = list(choice)
        while True:
            here = self._score(best, [()])
            moves = self._singles(best)
            if not moves:
                return (best, float(here.total[0])) if here.breach[0] == 0 else None
            found = self._score(best, moves)
            if here.breach[0] > 0:
                step = self._mend(best, float(here.total[0]), float(here.breach[0]), moves, found)
                if step is None:
                    return None
            else:
                step = self._descend(best, float(here.total[0]), moves, found)
                if step is None:
                    return best, float(here.total[0])
            best = step
            if self.late:
                here = self._score(best, [()])
                return (best, float(here.total[0])) if here.breach[0] == 0 else None

    def _singles(self, choice: Sequence[int]) -> list[Move]:
        return [((i, o),) for i, options in enumerate(self._allowed) for o in options if o != choice[i]]

    def _score(self, choice: Sequence[int], moves: Sequence[Move]) -> Scores:
        """Evaluate each move; the empty move is the choice itself."""
        return scores(self.tables, choice, [move or ((0, choice[0]),) for move in moves])

    def _mend(
        self, choice: Sequence[int], total: float, breach: float, moves: list[Move], found: Scores
    ) -> list[int] | None:
        """Lower the breach at the least time for each part of it, about half of it at once."""
        lowered = np.minimum(breach - found.breach, breach)
        useful = np.flatnonzero(lowered > 1e-12 * breach)
        if not len(useful):
            return None
        price = (found.total[useful] - total) / lowered[useful]
        ranked = useful[np.lexsort((useful, -lowered[useful], price))]
        prefixes = list(_prefixes(moves, ranked))
        together = self._score(choice, prefixes)
        whole = np.flatnonzero(together.breach == 0)
        if len(whole):  # no more than needed
            return _applied(choice, prefixes[int(whole[0])])
        half = np.flatnonzero(together.breach <= breach / 2)
        pick = int(half[0]) if len(half) else int(np.argmin(together.breach))
        return _applied(choice, prefixes[pick]) if together.breach[pick] < breach else None

    def _descend(self, choice: Sequence[int], total: float, moves: list[Move], found: Scores) -> list[int] | None:
        gain = np.where(found.breach == 0, total - found.total, -np.inf)
        better = np.flatnonzero(gain > self._least_gain)
        if len(better):
            ranked = better[np.lexsort((better, -gain[better]))]
            return self._best(choice, total, list(_prefixes(moves, ranked)))
        return self._best(choice, total, self._pairs(moves, found, total))

    def _best(self, choice: Sequence[int], total: float, moves: Sequence[Move]) -> list[int] | None:
        if not moves:
            return None
        found = self._score(choice, moves)
        value = np.where(found.breach == 0, found.total, np.inf)
        pick = int(np.argmin(value))
        return _applied(choice, moves[pick]) if value[pick] < total - self._least_gain else None

    def _pairs(self, moves: list[Move], found: Scores, total: float) -> list[Move]:
        """Return pairs of changes: one saves compute, the other memory or time on a lane."""
        ahead = self._rank(found.total - total + np.where(found.breach > 0, 0.0, 1e-9 * total))
        costs = found.total - total
        cheap = self._rank(np.where(found.breach == 0, costs, np.inf))
        picked = dict.fromkeys([*ahead[:PAIRED_CHANGES], *cheap[:PAIRED_CHANGES]])
        changes = [moves[m][0] for m in picked]
        return [tuple(sorted((a, b))) for n, a in enumerate(changes) for b in changes[:n] if a[0] != b[0]]

    def _rank(self, keys: Floats) -> list[int]:
        order = np.lexsort((np.arange(len(keys)), keys))
        return [int(m) for m in order if np.isfinite(keys[m])]


def fastest(tables: Tables, allowed: Sequence[Sequence[int]]) -> list[int]:
    """Return the option of each layer with the least compute; of equals, that with the least lane bytes, then held."""
    extra = tables.extra[FORWARD] + tables.extra[BACKWARD]
    keys = [[(extra[i, o], tables.near[i, o], tables.held[i, o], o) for o in row] for i, row in enumerate(allowed)]
    return [min(row)[-1] for row in keys]


def starts(tables: Tables, allowed: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield initial choices, made layer by layer under guessed prices of device memory and of the lanes.

    A byte on a lane costs from nothing to the time it takes there. A held byte costs from nothing to more than the most
    expensive option pays to free one. For each price of the lanes the best choice stays; the best of all comes first.
    """
    if not allowed:
        yield []
        return
    extra = tables.extra[FORWARD] + tables.extra[BACKWARD]
    crossing = tables.near * sum(1 / rate for rate in tables.near_rate)
    crossing = np.maximum(crossing, tables.far * sum(1 / rate for rate in tables.far_rate))
    freed = max(float(np.max(tables.held)), 1.0)
    dearest = max(float(np.max(extra)), float(np.max(crossing)), 1e-6) / freed
    barred = np.ones_like(extra, dtype=bool)
    for i, options in enumerate(allowed):
        barred[i, list(options)] = False
    best: dict[tuple[int, ...], tuple[float, float]] = {}
    for lane in LANE_PRICES if crossing.any() else (0.0,):
        costs = [extra + lane * crossing + held * dearest * tables.held for held in HELD_PRICES]
        found = (tuple(int(o) for o in np.argmin(np.where(barred, np.inf, cost), axis=1)) for cost in costs)
        choices = list(dict.fromkeys(found))
        marks = scores(tables, choices[0], [tuple(enumerate(choice)) for choice in choices])
        pick = int(np.lexsort((marks.total, marks.breach))[0])
        best[choices[pick]] = float(marks.breach[pick]), float(marks.total[pick])
    yield from map(list, sorted(best, key=lambda choice: best[choice]))


def _prefixes(moves: Sequence[Move], ranked: Iterable[int]) -> Iterable[Move]:
    """Yield the best change, the best two, four ... of different layers; at last all of them."""
    taken: dict[int, Change] = {}
    for m in ranked:
        change = moves[int(m)][0]
        if change[0] in taken:
            continue
        taken[change[0]] = change
        if len(taken) & (len(taken) - 1) == 0 or len(taken) <= 8:
            yield tuple(sorted(taken.values()))
    if len(taken) > 8 and len(taken) & (len(taken) - 1):
        yield tuple(sorted(taken.values()))


def _applied(choice: Sequence[int], move: Move) -> list[int]:
    result = list(choice)
    for layer, option in move:
        result[layer] = option
    return result
