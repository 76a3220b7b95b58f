"""Pinned memory in exact sizes: apart, in order, grown, trimmed, capped, and refused once."""

import gc
import mmap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.base.ticket import Ticket
from actstore.errors import StateError
from actstore.tiers.arena import IDLE_STEPS, Arena, room
from tests.devices.late import LateDevice


@pytest.fixture(autouse=True)
def all_freed():
    """In place of the check of that name: most of these tests end with memory in use."""


PAGE = mmap.PAGESIZE


class Promise(Ticket):
    """An operation that is complete when the test says so."""

    def __init__(self):
        self.done = False

    def ready(self):
        return self.done

    def wait_on(self, stream):
        raise AssertionError("the arena waits")

    result = wait_on


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr("actstore.tiers.arena.SEGMENT_NBYTES", 4 * PAGE)


@pytest.fixture
def device():
    return LateDevice()


def address(taken):
    return taken.memory.data_ptr()


# -- exact sizes ------------------------------------------------------------------------------------------------------


def test_memory_is_exact_and_aligned_and_apart(device):
    arena = Arena(device)
    taken = [arena.take(nbytes) for nbytes in (0, 1, 64, 65, 1000, 5 * PAGE)]
    assert [t.memory.numel() for t in taken] == [0, 1, 64, 65, 1000, 5 * PAGE]
    assert [t.size for t in taken] == [room(n) for n in (0, 1, 64, 65, 1000, 5 * PAGE)]
    assert [room(n) for n in (0, 1, 64, 65, 1000)] == [64, 64, 64, 128, 1024]
    assert all(t.memory.dtype == torch.uint8 and t.memory.dim() == 1 and not t.after for t in taken)
    spans = sorted((t.memory.data_ptr(), t.size) for t in taken if t.memory.numel())
    assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
    assert arena.used_nbytes == sum(t.size for t in taken)
    for t in taken:
        arena.free(t)
    assert arena.used_nbytes == 0


def test_segments_are_whole_pages_and_grow_with_what_there_is(device):
    arena = Arena(device)
    for _ in range(4):
        arena.take(4 * PAGE)
    arena.take(4 * PAGE + 1)
    assert device.sizes == [4 * PAGE] * 4 + [5 * PAGE]
    arena.take(400 * PAGE)
    arena.take(10 * PAGE)
    assert device.sizes[-1] == 53 * PAGE  # an eighth of 421
    assert arena.nbytes == sum(device.sizes) == sum(segment.numel() for segment in device.segments.values())


def test_what_is_freed_merges_and_the_lowest_address_comes_first(device):
    arena = Arena(device)
    taken = [arena.take(PAGE) for _ in range(4)]
    for t in (taken[2], taken[0], taken[1]):
        arena.free(t)
    assert address(arena.take(3 * PAGE)) == address(taken[0])
    assert len(device.segments) == 1


@given(
    st.lists(st.tuples(st.sampled_from("tttffr"), st.integers(0, 5 * PAGE), st.integers(0, 99)), max_size=80),
    st.sampled_from([8 * PAGE, 2**31]),
)
def test_no_byte_has_two_owners_and_no_operation_is_forgotten(commands, ahead_nbytes):
    """Whoever gets memory that an operation still uses is told so, after any number of owners."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actstore.tiers.arena.AHEAD_NBYTES", ahead_nbytes)
        check_owners(commands)


def check_owners(commands):
    arena, owned, running = Arena(LateDevice()), [], []  # running: of start, end, promise
    for what, nbytes, which in commands:
        if what == "t":
            t = arena.take(nbytes)
            start, end = t.segment.memory.data_ptr() + t.start, t.segment.memory.data_ptr() + t.start + t.size
            assert all(end <= a or b <= start for a, b, _ in owned)
            assert {p for a, b, p in running if a < end and start < b and not p.done} <= set(t.after)
            assert all(not p.done for p in t.after)
            owned.append((start, end, t))
        elif what == "f" and owned:
            start, end, t = owned.pop(which % len(owned))
            promises = [Promise() for _ in range(which % 3)]
            running += [(start, end, promise) for promise in promises]
            arena.free(t, promises)
        elif what == "r" and running:
            running.pop(which % len(running))[2].done = True
        if what == "r" and which % 5 == 0:
            arena.trim()
            addresses = [(m.data_ptr(), m.data_ptr() + m.numel()) for m in arena._device.segments.values()]
            for a, b, _ in owned + [item for item in running if not item[2].done]:
                assert any(start <= a and b <= end for start, end in addresses), "returned while in use"
        assert arena.used_nbytes == sum(end - start for start, end, _ in owned)
    for _, _, t in owned:
        arena.free(t)
    assert arena.used_nbytes == 0
    arena.close()
    assert not arena._device.segments


# -- operations that still run ----------------------------------------------------------------------------------------


def test_memory_in_use_is_given_out_only_when_its_operations_are_complete(device):
    arena, promise = Arena(device), Promise()
    first = arena.take(PAGE)
    arena.free(first, [promise])
    second = arena.take(PAGE)
    assert address(second) != address(first)
    promise.done = True
    third = arena.take(PAGE)
    assert (address(third), list(third.after)) == (address(first), [])


def test_rather_than_grow_it_gives_memory_out_early_with_what_to_wait_for(device):
    arena, promises = Arena(device), [Promise() for _ in range(4)]
    for taken, promise in zip([arena.take(PAGE) for _ in range(4)], promises, strict=True):
        arena.free(taken, [promise])
    two = arena.take(2 * PAGE)
    assert list(two.after) == promises[:2]  # the oldest, and no more than it takes
    promises[2].done = True
    three = arena.take(PAGE)
    assert list(three.after) == []
    assert len(device.segments) == 1
    four = arena.take(2 * PAGE)  # the last page is not enough, also early
    assert list(four.after) == []
    assert len(device.segments) == 2


def test_an_owner_that_never_used_its_memory_leaves_the_wait_to_the_next(device):
    arena, promise = Arena(device), Promise()
    arena.free(arena.take(4 * PAGE), [promise])
    arena.free(arena.take(4 * PAGE))
    assert list(arena.take(PAGE).after) == [promise]


def test_memory_given_out_early_is_not_returned_while_its_first_owner_uses_it(device):
    arena, promise = Arena(device), Promise()
    arena.free(arena.take(4 * PAGE), [promise])
    arena.free(arena.take(4 * PAGE))
    for _ in range(2 * IDLE_STEPS):
        arena.trim()
    assert len(device.segments) == 1
    promise.done = True
    arena.trim()
    assert device.segments == {}


# -- how much there is ------------------------------------------------------------------------------------------------


def step(arena, *sizes):
    """One step: what it takes it frees; then the next begins."""
    taken = [arena.take(size) for size in sizes]
    for t in taken:
        arena.free(t)
    arena.trim()


def test_a_steady_state_registers_nothing(device):
    arena = Arena(device)
    step(arena, *[3 * PAGE] * 10)
    made = len(device.sizes)
    for _ in range(10):
        step(arena, *[3 * PAGE] * 10)
    assert len(device.sizes) == made


def test_trim_returns_what_the_last_steps_did_not_need(device):
    arena = Arena(device)
    step(arena, *[4 * PAGE] * 8)
    for _ in range(IDLE_STEPS):
        assert arena.nbytes == 32 * PAGE
        step(arena, *[4 * PAGE] * 3)
    assert arena.nbytes == 12 * PAGE
    assert sum(segment.numel() for segment in device.segments.values()) == 12 * PAGE


def test_one_large_segment_does_not_stay_for_small_payloads(device):
    arena = Arena(device)
    step(arena, 1000 * PAGE)
    for _ in range(IDLE_STEPS):
        assert arena.nbytes == 1000 * PAGE
        step(arena, 100)
    step(arena, 100)
    assert arena.nbytes == 4 * PAGE


@pytest.mark.parametrize("shapes", ["lengths", "sizes"])
def test_random_shapes_waste_little_and_register_rarely(device, monkeypatch, shapes):
    """At a scale of 1 to 1024: sizes of any kind, and a transformer's tensors for a length that changes every step."""
    monkeypatch.setattr("actstore.tiers.arena.SEGMENT_NBYTES", 2**16)
    random, arena, held, made, needed = Random(0), Arena(device), [], 0, 0
    for number in range(100):
        if shapes == "lengths":
            length = random.randint(500, 4000)
            sizes = [length * each for _ in range(16) for each in (4, 4, 4, 4, 4, 10, 10, 10)]
        else:
            sizes = [int(64 * 2 ** random.uniform(0, 10)) for _ in range(150)]
        taken = [arena.take(size) for size in sizes]
        if number >= 10:
            needed = max(needed, arena.used_nbytes)
            held.append(arena.nbytes)
        else:
            made, needed = len(device.sizes), max(needed, arena.used_nbytes)
        while taken:
            arena.free(taken.pop(max(0, len(taken) - 1 - int(random.expovariate(0.5)))))
        arena.trim()
    assert max(held) <= 1.5 * needed
    assert (len(device.sizes) - made) / 90 <= 0.3


def test_small_segments_fill_first(device):
    arena = Arena(device)
    large, small = arena.take(100 * PAGE), arena.take(4 * PAGE)
    for taken in (large, small):
        arena.free(taken)
    assert address(arena.take(100)) == address(small)
    assert address(arena.take(99 * PAGE)) == address(large)


def test_a_segment_in_use_is_not_returned(device):
    arena, promise = Arena(device), Promise()
    held, busy = arena.take(100 * PAGE), arena.take(200 * PAGE)
    arena.free(busy, [promise])
    for _ in range(2 * IDLE_STEPS):
        arena.trim()
    assert len(device.segments) == 2
    promise.done = True
    arena.trim()
    assert len(device.segments) == 1
    arena.free(held)
    arena.trim()
    assert device.segments == {}


def test_variable_shapes_do_not_make_it_grow(device):
    arena, generator = Arena(device), torch.Generator().manual_seed(0)
    for _ in range(300):
        sizes = torch.randint(1, 6 * PAGE, (20,), generator=generator).tolist()
        step(arena, *sizes)
        assert arena.nbytes <= 2 * 20 * 6 * PAGE
    assert arena.nbytes <= 2 * 20 * 3 * PAGE + 4 * PAGE


def test_a_cap(device):
    arena = Arena(device, 8 * PAGE)
    first = arena.take(7 * PAGE)
    assert arena.take(2 * PAGE) is None
    second = arena.take(PAGE)
    assert arena.nbytes == 8 * PAGE
    arena.free(first)
    arena.free(second)
    third = arena.take(8 * PAGE)  # the small segments make way
    assert arena.nbytes == 8 * PAGE
    assert arena.take(1) is None
    arena.free(third)
    assert Arena(device, 0).take(1) is None


def test_a_cap_that_is_in_use_keeps_its_segments(device):
    arena = Arena(device, 8 * PAGE)
    taken = [arena.take(4 * PAGE) for _ in range(2)]
    arena.free(taken[0])
    assert arena.take(5 * PAGE) is None
    assert len(device.segments) == 2
    assert arena.take(4 * PAGE) is not None


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_refusal_falls_back_to_pageable_memory_with_one_warning(device):
    arena = Arena(device)
    assert arena.pinned
    kept = arena.take(4 * PAGE)
    device.refuses = True
    with pytest.warns(RuntimeWarning, match=r"refused 16.0 KiB of pinned memory. Pageable.*ulimit -l.*Host\(budget\)"):
        taken = arena.take(100)
    assert not arena.pinned
    taken.memory.fill_(1)
    device.refuses = False
    assert arena.take(4 * PAGE).memory.numel() == 4 * PAGE
    assert len(device.sizes) == 1, "asked again"
    assert arena.nbytes == 12 * PAGE
    arena.free(kept)
    arena.close()
    assert device.segments == {}


def test_a_warning_that_is_an_error_breaks_nothing(device):
    device.refuses = True
    arena = Arena(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="Pageable"):
            arena.take(100)
    assert (arena.used_nbytes, arena.nbytes) == (0, 0)
    assert arena.take(100).memory.numel() == 100


# -- threads and the end ----------------------------------------------------------------------------------------------


def test_close_returns_all_and_takes_back_what_comes_later(device):
    arena = Arena(device)
    first, second = arena.take(100), arena.take(4 * PAGE)
    arena.free(first, [Promise()])
    arena.close()
    assert (device.segments, arena.nbytes) == ({}, 0)
    alive = ref(second.memory)
    arena.free(second)
    del second
    assert alive() is None
    assert arena.used_nbytes == 0
    arena.trim()
    arena.close()
    with pytest.raises(StateError, match="Make a new ActivationStore"):
        arena.take(1)


def test_threads(device):
    arena = Arena(device)

    def work(seed):
        for i in range(100):
            taken = [arena.take(64 * ((seed + i + j) % 90)) for j in range(3)]
            for number, t in enumerate(taken):
                t.memory.fill_(10 * seed + number)
            for number, t in enumerate(taken):
                assert (t.memory == 10 * seed + number).all()
                arena.free(t)
            if i % 20 == 0:
                arena.trim()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert arena.used_nbytes == 0


def test_free_in_a_finalizer_while_the_lock_is_held(device):
    arena = Arena(device)

    class Owner(SimpleNamespace):
        def __del__(self):
            arena.free(self.taken)

    def collect_inside():
        for close in (False, True):
            owner = Owner(taken=arena.take(100))
            owner.me = owner  # a cycle: only the collector frees it
            del owner
            if close:
                arena.close()
            with arena._lock:
                gc.collect()

    thread = threading.Thread(target=collect_inside, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive(), "deadlock"
    assert arena.used_nbytes == 0
