"""Descents: saved tensors that leave a plan one after the other."""

from __future__ import annotations

from itertools import pairwise

import pytest

from actstore.compiled.budget.descent import descend
from tests.compiled.budget.random_steps import random_step


@pytest.mark.parametrize("seed", range(8))
def test_a_descent_ends_where_no_tensor_alone_lowers_the_peak(seed: int) -> None:
    step, plain = random_step(seed, length=9)
    start = step.evaluate(plain)
    way = list(descend(step, start))
    assert way[0] is start
    for before, after in pairwise(way):
        assert after.saved < before.saved | {0}
        assert (after.peak, sum(after.held.values())) < (before.peak, sum(before.held.values()))
    last = way[-1]
    for index in last.saved:
        owned = {other for other in last.saved if step.operators[other].owner == step.operators[index].owner}
        assert step.evaluate(last.saved - owned).peak >= last.peak
    assert all(found == step.evaluate(found.saved) for found in way)


def test_descents_are_not_all_empty() -> None:
    steps = [random_step(seed, length=9) for seed in range(8)]
    assert sum(len(list(descend(step, step.evaluate(plain)))) - 1 for step, plain in steps) > 8
