"""Copies to a tier and back, against a clock that ticks."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actstore.compiled.budget import lane as lanes
from actstore.compiled.budget.lane import Payloads, TierLane

LANE = TierLane("disk", inf, 1.0, 1.0, inf, (4, 8), on_host=True, recycles=True)
CASES = st.tuples(
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5)), max_size=8),
    st.sampled_from([1, 4, 8, 100]),
)


@pytest.fixture(autouse=True)
def calls_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "CALL_MS", 0.0)
    monkeypatch.setattr(lanes, "SLACK_NBYTES", 0)


def payloads_of(times: list[int], places: list[tuple[int, int]], opens: bool = True) -> Payloads:
    inside = sorted((position % len(times), nbytes) for position, nbytes in places)
    return Payloads(inside, [float(ms) for ms in times], [opens] * len(times))


TICKS = 60  # of a millisecond, which two to five copies at once share evenly


class Clock:
    """Copies that are at work at once share a byte of each millisecond."""

    def __init__(self, busy: int = 0) -> None:
        self.busy = busy * TICKS
        self.queue: list[list[float]] = []  # what is left of each, and its bytes
        self.late = 0

    def tick(self) -> None:
        if self.busy:
            self.busy -= 1
            return
        for copy in self.queue:
            copy[0] -= 1 / TICKS / len(self.queue)
        self.queue = [copy for copy in self.queue if copy[0] > 1e-9]

    def wait(self) -> None:
        self.late += 1
        self.tick()


@given(CASES)
def test_forward_takes_as_long_as_a_clock_says(case: tuple[list[int], list[tuple[int, int]], int]) -> None:
    times, places, window = case
    payloads, clock = payloads_of(times, places), Clock()
    for position, ms in enumerate(times):
        for _ in range(TICKS * ms):
            clock.tick()
        for nbytes in (nbytes for at, nbytes in payloads.places if at == position):
            while clock.queue and sum(size for _, size in clock.queue) + nbytes > window:
                oldest = clock.queue[0]
                while any(copy is oldest for copy in clock.queue):
                    clock.wait()
            clock.queue.append([nbytes, nbytes])
    found = LANE.leave(payloads, window)
    assert sum(found.ms) == pytest.approx(clock.late / TICKS, abs=len(payloads.places) / TICKS)
    assert found.after_ms == pytest.approx(sum(left for left, _ in clock.queue), abs=len(payloads.places) / TICKS)


@given(CASES, st.integers(0, 6))
def test_backward_takes_as_long_as_a_clock_says(case: tuple[list[int], list[tuple[int, int]], int], busy: int) -> None:
    times, places, window = case
    payloads, clock = payloads_of(times, places), Clock(busy)
    sizes, queued, copies = [nbytes for _, nbytes in payloads.places], 0, list[list[float]]()

    def look_ahead(read: int) -> None:
        nonlocal queued
        while queued < len(sizes) and (read == queued or sum(sizes[read : queued + 1]) <= window):
            copies.append([sizes[queued], sizes[queued]])
            clock.queue.append(copies[-1])
            queued += 1

    look_ahead(0)
    number = 0
    for position, ms in enumerate(times):
        while number < len(sizes) and payloads.places[number][0] == position:
            number += 1
            look_ahead(number)
            while any(copy is copies[number - 1] for copy in clock.queue):
                clock.wait()
        for _ in range(TICKS * ms):
            clock.tick()
    found = sum(LANE.come(payloads, window, float(busy)).ms)
    assert found == pytest.approx(clock.late / TICKS, abs=2 * len(sizes) / TICKS)


@given(CASES)
def test_buffers_keep_their_bound(
    case: tuple[list[int], list[tuple[int, int]], int],
) -> None:
    times, places, window = case
    payloads = payloads_of(times, places)
    largest = max((nbytes for _, nbytes in payloads.places), default=0)
    for lane in (LANE, replace(LANE, recycles=False), replace(LANE, on_host=False)):
        both = [lane.leave(payloads, window), lane.come(payloads, window, 0.0)]
        bound = max(window, largest) * (1 if lane.on_host else 2) + (0 if lane.recycles else largest)
        assert all(nbytes <= bound for moved in both for nbytes in moved.waiting)
    if payloads.places:
        moving = sum(nbytes for _, nbytes in payloads.places)
        assert both[0].waiting[-1] == min(bound, moving)
        assert both[1].waiting[-1] == 0, "all has been read"


def test_a_copy_waits_for_an_operator_that_is_no_loop() -> None:
    """Loops of a compiler hold the lock that the threads of copies need to begin."""
    places = [(0, 4), (3, 4)]
    free, held = (payloads_of([1, 4, 4, 1], places, opens) for opens in (True, False))
    assert LANE.leave(free, 4).ms == [0, 0, 0, 0]
    assert LANE.leave(held, 4).ms == [0, 0, 0, 4], "the first one begins when the step waits for it"
    last = held._replace(opens=[False, False, True, False])
    assert LANE.leave(last, 4).ms == [0, 0, 0, 0]
    reads = [(0, 4), (3, 4)]
    assert LANE.come(free._replace(places=reads), 4, 0.0).ms == [8, 0, 0, 0], "beside the next one"
    assert LANE.come(held._replace(places=reads), 4, 0.0).ms == [8, 0, 0, 0], "what waits begins with it"
    later = held._replace(places=[(2, 4), (3, 4)])
    assert LANE.come(later, 4, 0.0).ms == [0, 0, 8, 0]
    assert LANE.come(later._replace(opens=[True, False, False, False]), 4, 0.0).ms == [0, 0, 0, 4]


def test_an_accelerator_copies_what_it_reads_out_of_a_buffer() -> None:
    lane = replace(LANE, on_host=False, copy=2.0)
    payloads = payloads_of([5, 5, 5], [(2, 4)])
    assert lane.leave(payloads, 4).ms == [0, 0, 2]
    assert lane.come(payloads, 4, 1e9).ms == [0, 0, 2], "both directions at once"
    assert LANE.come(payloads, 4, 9.0).ms == [0, 0, 3]
