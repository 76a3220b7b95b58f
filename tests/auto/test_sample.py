"""Calls of units at the turns of a step."""

from hypothesis import given
from hypothesis import strategies as st

from actstore.auto.sample import MAX_TURNS, calls_at_turns, largest_turns


def test_calls_grow_and_shrink_with_the_bytes_that_wait():
    found = calls_at_turns({"a": 2, "b": 3, "c": 1}, {"a": 8, "b": 4, "c": 5}, {"a": [20, 70, 0], "b": [30, 30, 60]})
    assert found == {"a": [2, 7, 0], "b": [2, 2, 4], "c": [1, 1, 1]}  # b: at most its calls; c holds nothing


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)), max_size=12))
def test_each_turn_has_one_with_no_less_of_any_unit(columns):
    found = largest_turns(columns)
    assert len(found) <= MAX_TURNS
    for column in columns:
        assert any(all(turn[name] >= count for name, count in column.items()) for turn in found)
    if len(found) < MAX_TURNS:  # none is a sum of several, and none is there for nothing
        names = {name for column in columns for name in column}
        rows = [{name: column.get(name, 0) for name in names} for column in columns]
        assert all(turn in rows for turn in found)
        assert not any(a is not b and all(a[n] >= b[n] for n in names) for a in found for b in found)
