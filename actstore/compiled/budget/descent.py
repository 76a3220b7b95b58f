"""Saved tensors that leave a plan one after the other, the cheapest for their bytes first, while its peak falls."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Literal, NamedTuple

from actstore.compiled.budget.lane import CALL_MS
from actstore.compiled.budget.step import RegionEvaluation, RegionStep


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
    """Return the choice behind the first change that helps, and the owner of what it computes again; None for none.

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
    """Return the choice behind a change."""
    away = found.away.keys()
    if move.how == "away":
        return step.leaving(found, away | {move.owner})
    if move.how == "encoded":
        return step.leaving(step.encoding(found, found.encoded.keys() | {move.owner}), away)
    left = {index for index in found.saved | small if step.operators[index].owner != move.owner}
    return step.leaving(step.encoding(step.evaluate(left), found.encoded.keys()), away)
