"""Choices of saved tensors, beside all of them."""

from __future__ import annotations

from itertools import combinations, product
from math import inf

import pytest

from actstore.compiled.budget.ladder import GAP, chain_of, ladder_of, wanted_by
from actstore.compiled.budget.operator import Operator
from actstore.compiled.budget.step import RegionStep
from actstore.compiled.budget.units import cuts_of
from actstore.plan.solver.chain import Limits
from actstore.plan.solver.solve import solve
from tests.compiled.budget.random_steps import random_step


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
