"""The choices of saved tensors that no other one beats, from the least memory to the least time.

The solver of `actstore.plan` finds them: each unit of the region is a layer of its chain. A choice is then evaluated on
the whole step, operator by operator. From some of them a descent goes on, tensor by tensor. The list does not depend on
a budget: a larger budget never gives a slower plan.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple

from actstore.compiled.budget.lane import CALL_MS, TierLane
from actstore.compiled.budget.step import RegionEvaluation, RegionStep
from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits
from actstore.plan.solver.solve import Solution, pareto

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


MAX_POINTS = 24  # limits for which the solver looks
TIME_LIMIT_S = 1.0  # for each of them
GAP = 0.005
MAX_DESCENTS = 6


@dataclass(frozen=True)
class Rung:
    """One choice of saved tensors.

    Attributes
    ----------
    units : of the step; empty for what PyTorch itself saves
    choice : option of each unit; empty for a choice of a descent
    evaluation : of the step
    solution : of the solver; of a descent the one that it beats, None for none
    """

    units: tuple[RegionUnit, ...]
    choice: tuple[int, ...]
    evaluation: RegionEvaluation
    solution: Solution | None = None

    @property
    def certificate(self) -> str:
        """Prediction and bound as text; empty for what PyTorch itself saves."""
        bounded = "" if self.solution is None else self.solution.certificate
        if self.choice or not self.units:
            return bounded
        own = f"predicted {self.evaluation.ms:.1f} ms, tensor by tensor"
        return f"{own}; unit by unit {bounded}" if bounded else f"{own}, no bound"


@dataclass(frozen=True)
class PlanLadder:
    """The choices of a region, the fastest first; each later one needs less memory.

    Attributes
    ----------
    plain : what PyTorch itself saves
    """

    plain: RegionEvaluation
    rungs: tuple[Rung, ...]

    def within(self, budget: int) -> tuple[Rung, ...]:
        """Return the choices that need no more than `budget` bytes, the fastest first."""
        return tuple(rung for rung in self.rungs if rung.evaluation.peak <= budget)


def ladder_of(step: RegionStep, saved: Set[int], others: Sequence[Set[int]] = ()) -> PlanLadder:
    """Return the choices of a region.

    saved : the tensors that PyTorch itself saves
    others : of further partitions, from which choices may start
    """
    plain = step.evaluate(saved, loops=True)
    small = small_of(step, plain)
    begins = [step.evaluate(small.union(each)) for each in dict.fromkeys((frozenset(saved), *map(frozenset, others)))]
    found, cuts = [Rung((), (), plain)], [units for begin in (plain, *begins[1:]) for units in cuts_of(step, begin)]
    for units in cuts:
        points = min(MAX_POINTS, 2 * len(units) + 1)
        for point in pareto(chain_of(step, units), Limits(inf), points, time_limit=TIME_LIMIT_S, gap=GAP):
            choice = point.solution.choice
            found.append(Rung(units, choice, step.evaluate(wanted_by(units, choice)), point.solution))
    rungs = _unbeaten(found)
    below = rungs[:0:-1]  # the least memory first
    starts = begins + [rung.evaluation for rung in below[:: max(1, len(below) // MAX_DESCENTS)]]
    found += _descents(replace(step, lane=None, encodes=False), starts, small, cuts[0], rungs)
    if step.encodes:
        starts += [step.encoding(begin, set(step.encodable(begin))) for begin in begins]
        found += _descents(replace(step, lane=None), starts, small, cuts[0], [])
    if step.lane is not None:
        all_away = [step.leaving(begin, set(step.movable(begin))) for begin in begins]
        starts += [each for each in all_away if each.moved <= step.lane.limit]
        found += _descents(step, starts, small, cuts[0], [])
        found += _wider(step, step.lane, _unbeaten(found))
    return PlanLadder(plain, tuple(_unbeaten(found)))


def _descents(
    step: RegionStep,
    starts: Sequence[RegionEvaluation],
    small: frozenset[int],
    units: tuple[RegionUnit, ...],
    rungs: Sequence[Rung],
) -> list[Rung]:
    """Return the choices on the way down from each start, with the solutions of `rungs` that they beat."""
    passed, found = set[tuple[frozenset[int], ...]](), []
    for start in starts:
        for lower in descend(step, start, small):
            key = lower.saved, frozenset(lower.away), frozenset(lower.encoded)
            if key in passed:
                break  # the remaining way is known
            passed.add(key)
            beaten = next((rung for rung in rungs if rung.evaluation.peak <= lower.peak), None)
            found.append(Rung(units, (), lower, None if beaten is None else beaten.solution))
    return found


def _wider(step: RegionStep, lane: TierLane, rungs: Sequence[Rung]) -> list[Rung]:
    """Return the choices that use the tier, with wider windows."""
    return [
        replace(rung, evaluation=step.leaving(rung.evaluation, rung.evaluation.away.keys(), window))
        for rung in rungs
        if rung.evaluation.away
        for window in lane.windows[1:]
    ]


def _unbeaten(found: list[Rung]) -> list[Rung]:
    rungs: list[Rung] = []
    for rung in sorted(found, key=lambda rung: (rung.evaluation.ms, rung.evaluation.peak)):
        if not rungs or rung.evaluation.peak < rungs[-1].evaluation.peak:
            rungs.append(rung)
    return rungs


def wanted_by(units: Sequence[RegionUnit], choice: Sequence[int]) -> frozenset[int]:
    """Return the tensors that a choice saves: inputs of units, and those of the options."""
    chosen = (unit.inputs | unit.options[option] for unit, option in zip(units, choice, strict=True))
    return frozenset().union(*chosen)


def chain_of(step: RegionStep, units: Sequence[RegionUnit]) -> LayerChain:
    """Return the chain of the units: each option evaluated alone, where all other units save what PyTorch saves."""
    base = [0] * len(units)
    layers = []
    for number, unit in enumerate(units):
        options, times = [], (0.0, 0.0)
        for option in range(len(unit.options)):
            choice = [*base[:number], option, *base[number + 1 :]]
            figures = _LayerFigures(step, units, number, step.evaluate(wanted_by(units, choice)))
            times = times if option else (figures.forward, figures.backward)
            options.append(
                LayerOption(
                    str(option),
                    figures.held,
                    forward=figures.forward - times[0],
                    backward=figures.backward - times[1],
                    forward_peak=figures.peaks[0],
                    backward_peak=figures.peaks[1],
                )
            )
        layers.append(Layer(str(number), *times, tuple(options)))
    return LayerChain(tuple(layers))


class _LayerFigures:
    """Bytes and times of one unit in an evaluated step.

    Attributes
    ----------
    held : bytes of the unit that forward leaves for backward
    forward, backward : ms
    peaks : peak of the bytes in forward and backward of the unit, without what earlier units hold
    """

    def __init__(self, step: RegionStep, units: Sequence[RegionUnit], number: int, found: RegionEvaluation) -> None:
        operators, firsts = step.operators, [unit.first for unit in units]
        before = sum(nbytes for owner, nbytes in found.held.items() if owner < units[number].first)
        mine = [nbytes for owner, nbytes in found.held.items() if units[number].first <= owner < units[number].last]
        self.held = sum(mine)
        end, latest, zones = units[-1].last, 0, [0] * len(found.backward)
        for position in range(len(found.backward) - 1, -1, -1):
            for source in operators[found.backward[position]].inputs:
                if source < end and not operators[source].given:
                    latest = max(latest, bisect_right(firsts, source) - 1)
            zones[position] = latest
        runs = [bisect_right(firsts, index) - 1 for index in found.forward]
        times, peaks = [], []
        for of, ms, live in zip((runs, zones), found.times, found.live, strict=True):
            here = [position for position, unit in enumerate(of) if unit == number]
            times.append(sum(ms[position] for position in here))
            peaks.append(max(self.held, max((live[position] - before for position in here), default=0)))
        self.forward, self.backward = times
        self.peaks = peaks


class _Move(NamedTuple):
    """A change of a choice: the saved tensors of one owner are computed again, wait in the tier, or as a payload."""

    price: float  # ms for a byte
    owner: int
    how: Literal["again", "away", "encoded"]


def descend(
    step: RegionStep, start: RegionEvaluation, small: frozenset[int] = frozenset()
) -> Iterator[RegionEvaluation]:
    """Yield `start`, and the choices on the way down from it.

    A tensor leaves where the peak falls, or stays while fewer bytes are held. What did not help is tried again when
    nothing else helps any more.

    small : results that are saved as soon as backward reads them
    """
    found, useless = start, set[tuple[int, str]]()
    while True:
        yield found
        for again in (False, True):
            lower = _lower(step, found, small, useless, again=again)
            if lower is not None:
                break
        if lower is None:
            return
        found, owner = lower
        if owner is not None:
            small = frozenset(index for index in small if step.operators[index].owner != owner)


def _lower(
    step: RegionStep, found: RegionEvaluation, small: Set[int], useless: set[tuple[int, str]], *, again: bool
) -> tuple[RegionEvaluation, int | None] | None:
    """Return the choice after the first change that helps, and the owner of what it computes again; None for none.

    Changes that do not help become `useless`.
    """
    order = _order(found)
    for move in _moves(step, found):
        if ((move.owner, move.how) in useless) == again:
            lower = _after(step, found, move, small)
            if _order(lower) < order:
                useless.discard((move.owner, move.how))
                return lower, move.owner if move.how == "again" else None
            useless.add((move.owner, move.how))
    return None


def _order(found: RegionEvaluation) -> tuple[int, int]:
    return found.peak, sum(found.held.values())


def _moves(step: RegionStep, found: RegionEvaluation) -> list[_Move]:
    """Return the changes that are possible, in the order of time for their bytes."""
    operators, lane = step.operators, step.lane
    moves, movable = [], set[int]() if lane is None else {*step.movable(found)} - found.away.keys()
    encodable = {*step.encodable(found)} - found.away.keys() - found.encoded.keys()
    for owner, members in step.members(found).items():
        nbytes = operators[owner].nbytes
        if not nbytes:
            continue
        if not any(operators[index].barred for index in members):
            again = {each for index in members for each in step.sources([index], found.saved - {index})}
            moves.append(_Move(sum(operators[index].again_ms for index in again) / nbytes, owner, "again"))
        if lane is not None and owner in movable and found.moved + nbytes <= lane.limit:
            ms = 2 * CALL_MS + nbytes * (1 / lane.copy + 1 / lane.out + 1 / lane.back)
            moves.append(_Move(ms / nbytes, owner, "away"))
        if owner in encodable:
            ms = 2 * operators[owner].code_ms
            moves.append(_Move(ms / max(1, nbytes - operators[owner].encoded), owner, "encoded"))
    return sorted(moves)


def _after(step: RegionStep, found: RegionEvaluation, move: _Move, small: Set[int]) -> RegionEvaluation:
    """Return the choice after a change."""
    away = found.away.keys()
    if move.how == "away":
        return step.leaving(found, away | {move.owner})
    if move.how == "encoded":
        return step.leaving(step.encoding(found, found.encoded.keys() | {move.owner}), away)
    left = {index for index in found.saved | small if step.operators[index].owner != move.owner}
    return step.leaving(step.encoding(step.evaluate(left), found.encoded.keys()), away)
