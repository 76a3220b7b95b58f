"""Local search on the timeline: from a choice to a better one, by moves of one, two or many layers.

Deterministic, unless it reaches its deadline. The search first repairs a choice that exceeds a limit, by the moves with
the least cost per byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import monotonic

import numpy as np

from actstore.plan.solver.batch import Change, Move, Scores, scores
from actstore.plan.solver.tables import BACKWARD, FORWARD, Floats, Tables

PAIRED_CHANGES = 64  # the search tries all pairs of so many changes
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
        """Return pairs of changes of which one saves compute, and the other memory or time on a lane."""
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


def starts(tables: Tables, allowed: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return initial choices, made layer by layer under guessed prices of device memory and of the lanes.

    A byte on a lane costs from nothing to the time it takes there. A held byte costs from nothing to more than the most
    expensive option pays to free one. For each price of the lanes the best choice stays; the best of all comes first.
    """
    if not allowed:
        return [[]]
    extra = tables.extra[FORWARD] + tables.extra[BACKWARD]
    crossing = tables.near * sum(1 / rate for rate in tables.near_rate)
    crossing = np.maximum(crossing, tables.far * sum(1 / rate for rate in tables.far_rate))
    freed = max(float(np.max(tables.held)), 1.0)
    dearest = max(float(np.max(extra)), float(np.max(crossing)), 1e-6) / freed
    barred = np.ones_like(extra, dtype=bool)
    for i, options in enumerate(allowed):
        barred[i, list(options)] = False
    best: dict[tuple[int, ...], tuple[float, float]] = {}
    for lane in LANE_PRICES:
        costs = [extra + lane * crossing + held * dearest * tables.held for held in HELD_PRICES]
        choices = [tuple(int(o) for o in np.argmin(np.where(barred, np.inf, cost), axis=1)) for cost in costs]
        marks = scores(tables, choices[0], [tuple(enumerate(choice)) for choice in choices])
        pick = int(np.lexsort((marks.total, marks.breach))[0])
        best[choices[pick]] = float(marks.breach[pick]), float(marks.total[pick])
    return [list(choice) for choice in sorted(best, key=lambda choice: best[choice])]


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
