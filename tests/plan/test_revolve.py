"""The Revolve schedule against its formula's published values, a dynamic program, and another implementation."""

from functools import cache

import pytest
from checkpoint_schedules import EndForward, EndReverse, Forward, Revolve
from hypothesis import given
from hypothesis import strategies as st

from actstore.plan.solver.revolve import MAX_AUTO_ADVANCES, advances, fewest_slots, positions


@pytest.mark.parametrize(
    ("length", "slots", "expected"),
    [(10, 3, 15), (16, 4, 27), (32, 5, 68), (50, 3, 180), (100, 10, 222), (1000, 10, 3636)],
)
def test_known_values(length, slots, expected):
    assert advances(length, slots) == expected
    assert advances(1, slots) == 0
    assert advances(length, 1) == length * (length - 1) // 2
    assert advances(length, length) == length - 1


@cache
def least(length, slots):
    """By trying every place of the first stored state."""
    if length == 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return min(j + least(length - j, slots - 1) + least(j, slots) for j in range(1, length))


def test_no_other_split_is_better():
    assert all(advances(n, c) == least(n, c) for n in range(1, 70) for c in range(1, 12))


def run(length, slots):
    """Steps that sweeps advance over which store states where `positions` says."""
    stored, steps = [0], 0
    for wanted in reversed(range(length)):
        while stored[-1] > wanted:
            stored.pop()
        first = stored[-1]
        stored += [first + p for p in positions(wanted - first + 1, slots - len(stored) + 1)]
        assert len(stored) <= slots
        steps += wanted - first
    return steps


@given(st.integers(1, 300), st.integers(1, 20))
def test_the_positions_cost_what_the_formula_says(length, slots):
    assert run(length, slots) == advances(length, slots)
    found = list(positions(length, slots))
    assert found == sorted(set(found))
    assert len(found) < slots
    assert all(0 < p < length - 1 for p in found)


@pytest.mark.parametrize("slots", range(1, 12))
def test_as_many_forwards_as_another_implementation(slots):
    for length in range(max(2, slots), 60, 3):
        schedule, steps = Revolve(length, slots), 0
        for action in schedule:
            if isinstance(action, Forward):
                steps += action.n1 - action.n0
            if isinstance(action, EndForward):
                continue
            if isinstance(action, EndReverse):
                break
        assert advances(length, slots) == steps - length, (length, slots)


def test_the_fewest_slots():
    def replays(length, slots):
        return advances(length, slots) - (length - 1)

    for length in (1, 2, 12, 100, 1000):
        slots = fewest_slots(length)
        assert replays(length, slots) < MAX_AUTO_ADVANCES * length
        assert slots == 1 or replays(length, slots - 1) >= MAX_AUTO_ADVANCES * length
    assert fewest_slots(1000) == 16


@pytest.mark.parametrize(("length", "slots"), [(0, 1), (1, 0)])
def test_nothing_to_reverse_is_an_error(length, slots):
    with pytest.raises(ValueError, match=r"cannot be reversed. Give 1 or more of each"):
        advances(length, slots)
