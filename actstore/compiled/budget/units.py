"""Units of a region's step between narrow places of its forward, and the choices of saved tensors in each."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from actstore.compiled.budget.step import RegionEvaluation, RegionStep

MAX_UNITS = 48
MIN_UNIT_SHARE = 0.5 / MAX_UNITS  # of the saved bytes
NARROW_SHARE = 0.6  # of the peak of the bytes that pass a place of the units on both sides
MAX_OPTIONS = 7  # of a unit
SMALL_SHARE = 1e-3  # of the peak: results of no more bytes, such as the statistics of a norm, are always saved


@dataclass(frozen=True)
class RegionUnit:
    """Operators of forward that run one after the other.

    Attributes
    ----------
    first, last : indices of the joint graph: the first operator, and the first one after the unit
    inputs : tensors that pass from earlier operators to these and to later ones
    options : tensors that are saved of the unit, by option, beside the inputs of all units; the first one is plain's.
        Each has the small ones
    """

    first: int
    last: int
    inputs: frozenset[int]
    options: tuple[frozenset[int], ...]


def cuts_of(step: RegionStep, plain: RegionEvaluation) -> list[tuple[RegionUnit, ...]]:
    """Return the units of a step with their options, in several cuts: each has half as many units as the last.

    plain : the step with what PyTorch saves
    """
    passing = _Passing(step)
    bounds = _bounds(step, plain, passing)
    own, small = {index for index in plain.saved if not step.operators[index].given}, small_of(step, plain)
    cuts = []
    while len(bounds) > 1:
        units = []
        for first, last in pairwise(bounds):
            mine = [index for index in own - small if first <= index < last]
            stay = frozenset(index for index in small if first <= index < last)
            units.append(RegionUnit(first, last, passing.at(first), _options(step, plain, mine, stay)))
        cuts.append(tuple(units))
        bounds = [*bounds[:-1:2], bounds[-1]] if len(bounds) > 2 else []
    return cuts


def small_of(step: RegionStep, plain: RegionEvaluation) -> frozenset[int]:
    """Return the results of forward that take next to no memory, and often much time to compute again."""
    operators, most = step.operators, SMALL_SHARE * plain.peak
    return frozenset(index for index in step.forward if 0 < operators[operators[index].owner].nbytes <= most)


class _Passing:
    """Tensors of forward by the place where they exist: made before it, and read at it or after it."""

    def __init__(self, step: RegionStep) -> None:
        operators = step.operators
        self._last: dict[int, int] = {}  # of each owner
        self._owned = [index for index in step.forward if operators[index].owner == index and operators[index].nbytes]
        for index in step.forward:
            for source in operators[index].inputs:
                owner = operators[source].owner
                self._last[owner] = max(self._last.get(owner, -1), index)
        changes = [0] * (len(operators) + 1)
        for index in self._owned:
            if (last := self._last.get(index, -1)) > index:
                changes[index + 1] += operators[index].nbytes
                changes[last + 1] -= operators[index].nbytes
        self.nbytes: list[int] = []  # by place
        now = 0
        for change in changes:
            now += change
            self.nbytes.append(now)

    def at(self, place: int) -> frozenset[int]:
        return frozenset(index for index in self._owned if index < place <= self._last.get(index, -1))


def _bounds(step: RegionStep, plain: RegionEvaluation, passing: _Passing) -> list[int]:
    """Return the places between units, the narrowest first, as long as each unit saves enough."""
    operators, end = step.operators, step.forward[-1] + 1 if step.forward else 0
    sums, total = [0] * (end + 1), 0
    own = {index for index in plain.saved if not operators[index].given}
    seen = set[int]()
    for index in range(end):
        owner = operators[index].owner
        if index in own and owner not in seen:
            seen.add(owner)
            total += operators[owner].nbytes
        sums[index + 1] = total
    bounds, widths = [0, end], passing.nbytes
    middle = sorted(widths[place] for place in step.forward)[len(step.forward) // 2] if step.forward else 0
    places = [index for index in step.forward if not operators[index].view and not operators[index].given]
    for place in sorted(places, key=lambda index: (widths[index], index)):
        if len(bounds) > MAX_UNITS:
            break
        at = bisect_right(bounds, place)
        before, after = bounds[at - 1], bounds[at]
        if place in (before, after) or min(sums[place] - sums[before], sums[after] - sums[place]) < (
            MIN_UNIT_SHARE * total
        ):
            continue
        around = min(max(widths[before : place + 1]), max(widths[place : after + 1]))
        if widths[place] <= max(NARROW_SHARE * around, middle):
            insort(bounds, place)
    return bounds


def _options(
    step: RegionStep, plain: RegionEvaluation, mine: Iterable[int], stay: frozenset[int]
) -> tuple[frozenset[int], ...]:
    """Return sets of saved tensors: all, fewer and fewer, those that `stay`. The costliest for their bytes leave last.

    The time of a tensor is that of the operators that make it from other saved tensors.
    """
    operators = step.operators

    def time(index: int) -> float:
        return sum(operators[each].again_ms for each in step.sources([index], plain.saved - {index}))

    price = {index: time(index) / max(1, operators[operators[index].owner].nbytes) for index in mine}
    order = sorted(price, key=lambda index: (price[index], index))
    owners: dict[int, list[int]] = {}
    for index in order:
        owners.setdefault(operators[index].owner, []).append(index)
    left, total = frozenset(order), sum(operators[owner].nbytes for owner in owners)
    options, dropped, step_nbytes = [left], 0, total / (MAX_OPTIONS - 1)
    for owner, members in owners.items():
        left -= frozenset(members)
        dropped += operators[owner].nbytes
        if dropped >= step_nbytes * len(options) or not left:
            options.append(left)
    return tuple(dict.fromkeys(option | stay for option in options))
