"""Descents: saved tensors that leave a plan one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest

from actstore.compiled.budget.descent import descend
from actstore.compiled.budget.lane import TierLane
from actstore.compiled.budget.operator import Operator
from actstore.compiled.budget.step import RegionEvaluation, RegionStep
from tests.compiled.budget.random_steps import LANE, random_step


@pytest.mark.parametrize("encodes", [False, True], ids=["exact", "lossy"])
@pytest.mark.parametrize("lane", [None, LANE], ids=["no tier", "a tier"])
@pytest.mark.parametrize("seed", range(8))
def test_a_descent_ends_where_no_tensor_alone_lowers_the_peak(seed: int, lane: TierLane | None, encodes: bool) -> None:
    step, plain = random_step(seed, length=9, lane=lane, encodes=encodes)

    def evaluated(saved: frozenset[int], encoded: Iterable[int], away: Iterable[int]) -> RegionEvaluation:
        return step.leaving(step.encoding(step.evaluate(saved), set(encoded)), set(away))

    start = step.evaluate(plain)
    way = list(descend(step, start))
    assert way[0] is start
    for before, after in pairwise(way):
        more = after.away.keys() >= before.away.keys() and after.encoded.keys() >= before.encoded.keys()
        assert after.saved < before.saved | {0} or (after.saved == before.saved and more)
        assert (after.peak, sum(after.held.values())) < (before.peak, sum(before.held.values()))
    last = way[-1]
    for index in last.saved:
        owned = {other for other in last.saved if step.operators[other].owner == step.operators[index].owner}
        assert evaluated(last.saved - owned, last.encoded, last.away).peak >= last.peak
    for owner in step.movable(last) if lane else ():
        assert step.leaving(last, last.away.keys() | {owner}).peak >= last.peak
    for owner in {*step.encodable(last)} - last.away.keys():
        assert evaluated(last.saved, {*last.encoded, owner}, last.away).peak >= last.peak
    assert all(found == evaluated(found.saved, found.encoded, found.away) for found in way)


def test_what_takes_long_to_compute_again_leaves_for_the_tier() -> None:
    """And what takes no time runs again."""
    step = RegionStep(
        (
            Operator((), 0, given=True),
            Operator((0,), 1, 8 << 20, 100.0, movable=8 << 20),
            Operator((1,), 2, 8 << 20, 0.0, movable=8 << 20),
            Operator((2,), 3, 1, 1.0),
            Operator((), 4, 10, given=True, late=True),
            Operator((4,), 5, 64 << 20, 1.0, late=True),
            Operator((1, 2, 5), 6, 10, 1.0, late=True),
        ),
        (3,),
        (6,),
        lane=LANE,
    )
    *_, last = descend(step, step.evaluate(frozenset({1, 2})))
    assert last.saved == {1}
    assert last.away == {1: 8 << 20}


def test_what_takes_long_to_compute_again_is_encoded() -> None:
    """And what takes no time runs again."""
    step = RegionStep(
        (
            Operator((), 0, given=True),
            Operator((0,), 1, 800, 100.0, encoded=200, code_ms=1.0),
            Operator((1,), 2, 800, 0.0, encoded=200, code_ms=1.0),
            Operator((2,), 3, 1, 1.0),
            Operator((), 4, 10, given=True, late=True),
            Operator((4,), 5, 10, 1.0, workspace=6400, late=True),
            Operator((1, 2, 5), 6, 10, 1.0, late=True),
        ),
        (3,),
        (6,),
        encodes=True,
    )
    way = [(found.saved, found.held) for found in descend(step, step.evaluate(frozenset({1, 2})))]
    assert way == [({1, 2}, {1: 800, 2: 800}), ({1}, {1: 800}), ({1}, {1: 200}), ({0}, {})]


def test_descents_are_not_all_empty() -> None:
    steps = [random_step(seed, length=9) for seed in range(8)]
    assert sum(len(list(descend(step, step.evaluate(plain)))) - 1 for step, plain in steps) > 8
