"""Pinned memory of a large arena, which a thread pins ahead while a step makes it grow."""

import os
import threading
import warnings
from itertools import pairwise

import pytest

from actstore.devices.workers import Threads
from actstore.tiers.arena import Arena
from actstore.tiers.host import HostTier
from tests.devices.late import LateDevice
from tests.simulation import install, simulation
from tests.tiers.test_arena import PAGE, address, all_freed, small_segments, step  # noqa: F401 - fixtures among them


class Gated(LateDevice):
    """Pins in a thread once the gate is open; `here_sizes` are those that the caller's thread pinned."""

    def __init__(self):
        super().__init__()
        self.gate, self.here_sizes, self.fails, self.most_nbytes = threading.Event(), [], None, 2**62
        self.begun = threading.Event()
        self.gate.set()

    def pinned(self, nbytes):
        if threading.current_thread().name.startswith("actstore-pin"):
            self.begun.set()
            assert self.gate.wait(60)
            if self.fails is not None:
                raise self.fails
        else:
            self.here_sizes.append(nbytes)
        memory = super().pinned(nbytes)
        assert sum(segment.numel() for segment in self.segments.values()) <= self.most_nbytes
        return memory

    def workers(self, count, name):
        return Threads(count, name)


@pytest.fixture
def gated(monkeypatch):
    monkeypatch.setattr("actstore.tiers.arena.AHEAD_NBYTES", 32 * PAGE)
    return Gated()


def at_the_gate(gated):
    """An arena of eight ranges whose thread waits until the gate opens, and the ranges."""
    arena = Arena(gated)
    gated.gate.clear()
    taken = [arena.take(4 * PAGE) for _ in range(8)]
    assert gated.begun.wait(60)
    return arena, taken


def test_while_a_step_makes_a_large_arena_grow_a_thread_pins_the_next_segment(gated):
    arena = Arena(gated)
    taken = [arena.take(4 * PAGE) for _ in range(8)]
    assert gated.here_sizes == [4 * PAGE] * 8  # as large as 32 pages, and from here on ahead
    taken += [arena.take(4 * PAGE) for _ in range(40)]
    assert gated.here_sizes == [4 * PAGE] * 8
    assert arena.nbytes >= 48 * 4 * PAGE
    spans = sorted((address(t), t.size) for t in taken)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
    for t in taken:
        arena.free(t)
    arena.close()
    assert (gated.segments, arena.used_nbytes) == ({}, 0)


def test_the_caller_does_not_wait_for_the_thread_while_there_is_room(gated):
    arena, taken = at_the_gate(gated)
    arena.free(taken.pop())
    taken.append(arena.take(4 * PAGE))
    arena.trim()  # the thread is still at it
    assert len(gated.segments) == 8
    timer = threading.Timer(0, gated.gate.set)
    timer.start()
    taken.append(arena.take(4 * PAGE))  # waits
    timer.join()
    assert gated.here_sizes == [4 * PAGE] * 8
    arena.close()


def test_what_a_step_did_not_need_is_unpinned_when_the_next_begins(gated):
    arena = Arena(gated)
    for _ in range(3):
        step(arena, *[4 * PAGE] * 8)
        if arena._ahead is not None:
            arena._ahead.result()
        arena.trim()
        assert (len(gated.segments), arena.nbytes, len(gated.sizes)) == (8, 32 * PAGE, 9)
    held = [arena.take(4 * PAGE) for _ in range(9)]  # a step that adds little pins only what it needs
    assert (arena._ahead, len(gated.sizes), len(held)) == (None, 10, 9)


def test_a_large_payload_gets_a_segment_beside_the_one_ahead(gated):
    arena = Arena(gated)
    for _ in range(8):
        arena.take(4 * PAGE)
    assert arena.take(100 * PAGE).memory.numel() == 100 * PAGE
    assert gated.here_sizes[-1] == 100 * PAGE
    arena.close()
    assert gated.segments == {}


def test_a_small_or_a_capped_arena_pins_nothing_ahead(gated):
    arena = Arena(gated)
    step(arena, *[4 * PAGE] * 7)
    assert (arena._threads, len(gated.sizes)) == (None, 7)
    gated.most_nbytes = 7 * 4 * PAGE + 37 * PAGE  # less than one more would need
    full = Arena(gated, 37 * PAGE)
    assert None not in [full.take(4 * PAGE) for _ in range(9)]
    assert (full.take(4 * PAGE), full._ahead) == (None, None)


def test_a_cap_counts_what_is_pinned_ahead(gated):
    gated.most_nbytes = 48 * PAGE
    arena = Arena(gated, 48 * PAGE)
    taken = []
    while (one := arena.take(4 * PAGE)) is not None:
        taken.append(one)
    assert len(taken) == 11  # some segments have five pages
    for one in taken:
        arena.free(one)
    assert arena.take(48 * PAGE).memory.numel() == 48 * PAGE
    arena.close()


@pytest.mark.parametrize("error", [None, OSError("no pages"), RuntimeError("CUDA error")])
def test_a_failure_ahead_is_no_warning_and_the_caller_asks_once_more(gated, error):
    gated.fails, gated.refuses = error, False
    arena, _taken = at_the_gate(gated)
    if error is None:
        gated.refuses = True
    gated.gate.set()
    assert arena._ahead.exception() is error
    gated.refuses = False
    for _ in range(20):
        arena.take(4 * PAGE)
    assert arena.pinned
    assert gated.here_sizes[8] == 4 * PAGE
    assert len(gated.here_sizes) >= 20  # nothing ahead any more
    arena.close()
    assert gated.segments == {}


def test_a_system_without_threads_pins_in_the_callers(gated, monkeypatch):
    def none(*args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Threads, "submit", none)
    arena = Arena(gated)
    for _ in range(40):
        arena.take(4 * PAGE)
    assert sum(gated.here_sizes) == arena.nbytes
    arena.close()


def test_close_waits_for_the_thread_and_unpins_what_it_pins(gated):
    arena, _taken = at_the_gate(gated)
    timer = threading.Timer(0, gated.gate.set)
    timer.start()
    arena.close()
    timer.join()
    assert len(gated.sizes) == 9
    assert (gated.segments, arena.nbytes) == ({}, 0)
    arena.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_pins_by_itself(gated):
    arena, _taken = at_the_gate(gated)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            arena.take(4 * PAGE)
            arena.close()
            code = int(gated.here_sizes != [4 * PAGE] * 9 or bool(gated.segments))
        finally:
            os._exit(code)
    gated.gate.set()
    assert os.waitpid(child, 0)[1] == 0
    arena.close()


@pytest.mark.parametrize("seed", range(10))
def test_the_simulated_device_sees_no_race_over_memory_pinned_ahead(monkeypatch, seed):
    install(monkeypatch)
    monkeypatch.setattr("actstore.tiers.arena.AHEAD_NBYTES", 8 * PAGE)
    with simulation(seed) as device:
        device.scheduler.host_may_wait = True
        tier, source = HostTier(device), device.empty(PAGE)
        for count in (40, 10, 60):
            slots = [tier.reserve(PAGE) for _ in range(count)]
            for slot in slots:
                tier.write(slot, source, [device.record(device.current())])
            for slot in slots:
                target = device.empty(PAGE)
                device.wait(device.current(), tier.read(slot, target, [device.record(device.current())]))
                device.compute(reads=[target])
                tier.free(slot)
            tier.trim()
        assert tier._arena._threads is not None
        tier.close()
        assert device.held_nbytes[1] == 0
