"""Choices of saved tensors, beside all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf

import pytest

from actstore.compiled.budget.ladder import GAP, chain_of, cuts_of, descend, ladder_of, wanted_by
from actstore.compiled.budget.lane import TierLane
from actstore.compiled.budget.operator import Operator
from actstore.compiled.budget.step import RegionEvaluation, RegionStep
from actstore.plan.solver.chain import Limits
from actstore.plan.solver.solve import solve
from tests.compiled.budget.random_steps import LANE, LARGE, random_step


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_beats_a_plan_by_much(seed: int) -> None:
    step, plain = random_step(seed, length=5)
    ladder = ladder_of(step, plain)
    every = [ladder.plain]
    for units in cuts_of(step, ladder.plain):
        choices = product(*(range(len(unit.options)) for unit in units))
        every += [step.evaluate(wanted_by(units, choice)) for choice in choices]
    for count in range(len(plain) + 1):
        every += [step.evaluate(frozenset(wanted)) for wanted in combinations(sorted(plain), count)]
    low, high = min(found.peak for found in every), ladder.plain.peak
    assert ladder.rungs[-1].evaluation.peak >= low
    for budget in range(low, high + 1, max(1, (high - low) // 8)):
        best = min(found.ms for found in every if found.peak <= budget)
        rungs = ladder.within(budget)
        assert all(rung.evaluation.peak <= budget for rung in rungs)
        if rungs:
            assert rungs[0].evaluation.ms >= best


def test_a_choice_may_save_what_plain_does_not() -> None:
    """Plain saves a large tensor; a small one from which it is made in no time holds less."""
    step = RegionStep(
        (
            Operator((), 0, given=True),
            Operator((0,), 1, 10, 9.0),
            Operator((1,), 2, 100, 0.1),
            Operator((2,), 3, 1, 1.0),
            Operator((), 4, 10, given=True, late=True),
            Operator((4,), 5, 10, 1.0, workspace=100, late=True),
            Operator((2, 5), 6, 10, 1.0, late=True),
        ),
        (3,),
        (6,),
    )
    alone, found = (ladder_of(step, frozenset({2}), others) for others in ((), [frozenset({1})]))
    assert not any(1 in rung.evaluation.saved for rung in alone.rungs)
    assert any(rung.evaluation.saved == {1} for rung in found.rungs)


def test_small_results_are_saved_where_what_is_made_of_them_is_computed_again() -> None:
    """As the statistics of a norm, whose result plain saves: to compute them again reads all of its input."""
    step = RegionStep(
        (
            Operator((), 0, given=True),
            Operator((0,), 1, 10_000, 9.0),
            Operator((1,), 2, 4, 5.0),
            Operator((1, 2), 3, 10_000, 0.1),
            Operator((3,), 4, 10_000, 9.0),
            Operator((4,), 5, 4, 5.0),
            Operator((4, 5), 6, 10_000, 0.1),
            Operator((6,), 7, 4, 1.0),
            Operator((), 8, 4, given=True, late=True),
            Operator((6, 8), 9, 4, 1.0, late=True),
            Operator((4, 9), 10, 4, 1.0, late=True),
            Operator((3, 10), 11, 4, 1.0, late=True),
            Operator((1, 11), 12, 4, 1.0, late=True),
        ),
        (7,),
        (12,),
    )
    plain, lower, *_ = ladder_of(step, frozenset({1, 3, 4, 6})).rungs
    assert plain.evaluation.saved == {1, 3, 4, 6}
    assert lower.evaluation.again
    assert lower.evaluation.again <= {3, 6}
    assert lower.evaluation.saved >= {1, 4}


@pytest.mark.parametrize("seed", range(6))
def test_a_tier_never_makes_a_plan_slower(seed: int) -> None:
    step, plain = random_step(seed, length=9, lane=LANE)
    without, found = ladder_of(replace(step, lane=None), plain), ladder_of(step, plain)
    for rung in without.rungs:
        assert found.within(rung.evaluation.peak)[0].evaluation.ms <= rung.evaluation.ms
    assert found.rungs[-1].evaluation.peak <= without.rungs[-1].evaluation.peak


@pytest.mark.parametrize("lane", [None, LANE], ids=["no tier", "a tier"])
@pytest.mark.parametrize("seed", range(6))
def test_payloads_never_make_a_plan_slower(seed: int, lane: TierLane | None) -> None:
    step, plain = random_step(seed, length=9, lane=lane, encodes=True)
    without, found = ladder_of(replace(step, encodes=False), plain), ladder_of(step, plain)
    assert not any(rung.evaluation.encoded for rung in without.rungs)
    for rung in without.rungs:
        assert found.within(rung.evaluation.peak)[0].evaluation.ms <= rung.evaluation.ms
    assert found.rungs[-1].evaluation.peak <= without.rungs[-1].evaluation.peak


def test_tensors_are_encoded_before_they_are_computed_again() -> None:
    step, plain = long_chain()
    operators = [
        each if each.late or each.given else replace(each, encoded=1 << 20, code_ms=0.25) for each in step.operators
    ]
    step = replace(step, lane=None)
    without, found = ladder_of(step, plain), ladder_of(replace(step, operators=operators, encodes=True), plain)
    fastest = found.within(without.rungs[-1].evaluation.peak)[0].evaluation
    assert without.rungs[-1].evaluation.ms > 1.04 * found.plain.ms
    assert fastest.ms < 1.01 * found.plain.ms
    assert fastest.encoded
    assert not fastest.again
    assert found.rungs[-1].evaluation.peak < 0.75 * without.rungs[-1].evaluation.peak


def long_chain() -> tuple[RegionStep, frozenset[int]]:
    """Ten products that take long, and their gradients. Every second one is the last to read two of them."""
    reads = [(index, index - 1) if index % 2 and index > 1 else (index,) for index in range(10)]
    forward = [Operator(inputs, at + 1, 4 << 20, 50.0, movable=4 << 20) for at, inputs in enumerate(reads)]
    gradient = Operator((), 11, 1 << 20, given=True, late=True)
    backward = [Operator((10 - index, 11 + index), 12 + index, 1 << 20, 50.0, late=True) for index in range(10)]
    operators = [Operator((), 0, given=True), *forward, gradient, *backward]
    return RegionStep(operators, (10,), (21,), lane=LANE), frozenset(range(1, 11))


def test_tensors_leave_for_the_tier_before_they_are_computed_again() -> None:
    step, plain = long_chain()
    without, found = ladder_of(replace(step, lane=None), plain), ladder_of(step, plain)
    least = without.rungs[-1].evaluation
    assert least.ms > 1.04 * found.plain.ms
    fastest = found.within(least.peak)[0].evaluation
    assert fastest.ms < 1.01 * found.plain.ms
    assert not fastest.again
    assert found.rungs[-1].evaluation.peak < 0.75 * least.peak


def test_a_tier_holds_no_more_than_its_room() -> None:
    step, plain = long_chain()
    room = 9 << 20
    moved = {rung.evaluation.moved for rung in ladder_of(replace(step, lane=replace(LANE, limit=room)), plain).rungs}
    assert max(moved) == 8 << 20
    assert max(rung.evaluation.moved for rung in ladder_of(step, plain).rungs) > room


def test_a_wider_window_is_a_choice_of_its_own() -> None:
    step, plain = long_chain()
    step = replace(step, lane=replace(LANE, windows=(LARGE, 12 * LARGE), out=1e5, back=1e5))
    rungs = ladder_of(step, plain).rungs
    assert {rung.evaluation.window for rung in rungs} == {0, LARGE, 12 * LARGE}
    for narrow, wide in pairwise(sorted((rung.evaluation for rung in rungs), key=lambda found: found.window)):
        if narrow.away == wide.away and narrow.window < wide.window:
            assert narrow.ms > wide.ms
            assert narrow.peak < wide.peak


@pytest.mark.parametrize("seed", range(6))
def test_more_budget_never_gives_a_slower_plan(seed: int) -> None:
    step, plain = random_step(seed, length=9)
    ladder = ladder_of(step, plain)
    peaks = [rung.evaluation.peak for rung in ladder.rungs]
    times = [rung.evaluation.ms for rung in ladder.rungs]
    assert peaks == sorted(set(peaks), reverse=True)
    assert times == sorted(times)
    last = inf
    for budget in range(peaks[-1], peaks[0] + 1, 512):
        fastest = ladder.within(budget)[0].evaluation
        assert fastest.peak <= budget
        assert fastest.ms <= last
        last = fastest.ms
    assert not ladder.within(peaks[-1] - 1)
    assert ladder.within(peaks[0])[0].evaluation == ladder.plain


@pytest.mark.parametrize("seed", range(6))
def test_the_solver_is_as_good_as_brute_force_on_the_chain_of_units(seed: int) -> None:
    step, plain = random_step(seed, length=7)
    units = max(cuts_of(step, step.evaluate(plain)), key=len)
    chain = chain_of(step, units)
    totals = {}
    for choice in product(*(range(len(unit.options)) for unit in units)):
        held, peak, ms = 0.0, 0.0, chain.plain
        for layer, option in zip(chain.layers, choice, strict=True):
            figures = layer.options[option]
            peak = max(peak, held + max(figures.forward_peak, figures.backward_peak))
            held, ms = held + figures.held, ms + figures.forward + figures.backward
        totals[choice] = (peak, ms)
    for limit in sorted({peak for peak, _ in totals.values()}):
        best = min(ms for peak, ms in totals.values() if peak <= limit)
        found = solve(chain, Limits(limit), gap=GAP)
        assert found.evaluation.total <= best * (1 + GAP) + 1e-9


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
