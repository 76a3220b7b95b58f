"""Saved tensors that leave a plan one after the other, the cheapest for their bytes first, while its peak falls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from actstore.compiled.budget.lane import CALL_MS
from actstore.compiled.budget.step import RegionEvaluation, RegionStep


class _Move(NamedTuple):
    """A change of a choice: the saved tensors of one owner are computed again, or wait in the tier."""

    price: float  # ms for a byte
    owner: int
    away: bool


def descend(step: RegionStep, start: RegionEvaluation) -> Iterator[RegionEvaluation]:
    """Yield `start`, and the choices on the way down from it.

    A tensor leaves where the peak falls, or stays while fewer bytes are held. What did not help is tried again when
    nothing else helps any more.
    """
    found, useless = start, set[tuple[int, bool]]()
    while True:
        yield found
        for again in (False, True):
            lower = _lower(step, found, useless, again=again)
            if lower is not None:
                break
        if lower is None:
            return
        found = lower


def _lower(
    step: RegionStep, found: RegionEvaluation, useless: set[tuple[int, bool]], *, again: bool
) -> RegionEvaluation | None:
    """Return the choice behind the first change that helps; None for none. Those that do not help become `useless`."""
    order = _order(found)
    for move in _moves(step, found):
        if ((move.owner, move.away) in useless) == again:
            lower = _after(step, found, move)
            if _order(lower) < order:
                useless.discard((move.owner, move.away))
                return lower
            useless.add((move.owner, move.away))
    return None


def _order(found: RegionEvaluation) -> tuple[int, int]:
    return found.peak, sum(found.held.values())


def _moves(step: RegionStep, found: RegionEvaluation) -> list[_Move]:
    """Return the changes that are possible, in the order of time for their bytes."""
    operators, lane = step.operators, step.lane
    moves, movable = [], set[int]() if lane is None else {*step.movable(found)} - found.away.keys()
    for owner, members in step.members(found).items():
        nbytes = operators[owner].nbytes
        if not nbytes:
            continue
        if not any(operators[index].barred for index in members):
            again = {each for index in members for each in step.sources([index], found.saved - {index})}
            moves.append(_Move(sum(operators[index].again_ms for index in again) / nbytes, owner, away=False))
        if lane is not None and owner in movable and found.moved + nbytes <= lane.limit:
            ms = 2 * CALL_MS + nbytes * (1 / lane.copy + 1 / lane.out + 1 / lane.back)
            moves.append(_Move(ms / nbytes, owner, away=True))
    return sorted(moves)


def _after(step: RegionStep, found: RegionEvaluation, move: _Move) -> RegionEvaluation:
    """Return the choice behind a change."""
    if move.away:
        return step.leaving(found, found.away.keys() | {move.owner})
    left = {index for index in found.saved if step.operators[index].owner != move.owner}
    return step.leaving(step.evaluate(left), found.away.keys())
