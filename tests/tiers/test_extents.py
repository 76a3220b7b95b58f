"""Ranges of one space against a naive map of its bytes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from actstore.tiers.extents import Extents


class Naive:
    """One flag for each unit of space."""

    def __init__(self):
        self.used = []

    def take(self, n):
        for start in range(len(self.used) + 1):
            if not any(self.used[start : start + n]) and (start + n <= len(self.used) or start == len(self.used)):
                self.used[start : start + n] = [True] * n
                return start
        raise AssertionError

    def give(self, start, n):
        assert all(self.used[start : start + n])
        self.used[start : start + n] = [False] * n
        while self.used and not self.used[-1]:
            self.used.pop()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, 30)), max_size=60))
def test_first_fit_without_overlap(commands):
    extents, naive, taken = Extents(), Naive(), []
    for take, n, which in commands:
        if take or not taken:
            start = extents.take(n)
            assert start == naive.take(n)
            taken.append((start, n))
        else:
            start, n = taken.pop(which % len(taken))
            extents.give(start, n)
            naive.give(start, n)
        assert extents.end == len(naive.used)
        edges = [0, *[edge for start, n in sorted(extents._free) for edge in (start, start + n)], extents.end]
        assert all(a < b for a, b in pairwise(edges[1:])), "free ranges touch each other or the end"
    for start, n in taken:
        extents.give(start, n)
    assert extents.end == 0
    assert extents._free == []


def test_neighbours_merge():
    extents = Extents()
    starts = [extents.take(10) for _ in range(4)]
    for start in (starts[0], starts[2], starts[1]):
        extents.give(start, 10)
    assert extents.take(30) == 0
    extents.give(0, 30)
    extents.give(starts[3], 10)
    assert extents.end == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, 30)), max_size=60))
def test_within_a_limit_it_is_the_same_or_none(commands):
    most, extents, naive, taken = 20, Extents(), Naive(), []
    for take, n, which in commands:
        if take or not taken:
            before = list(naive.used)
            wanted = naive.take(n)
            if len(naive.used) > most:
                wanted, naive.used = None, before
            assert extents.take_within(n, most) == wanted
            if wanted is not None:
                taken.append((wanted, n))
        else:
            start, n = taken.pop(which % len(taken))
            extents.give(start, n)
            naive.give(start, n)
        assert extents.end == len(naive.used)
