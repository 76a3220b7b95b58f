"""Buffers that are used again: bounded, exact, shared by threads and finalizers."""

import gc
import sys
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actstore.devices import Cpu
from actstore.errors import StateError
from actstore.tiers import BufferPool


class Pool(BufferPool):
    """A pool that knows which buffer goes where."""

    def __init__(self):
        super().__init__()
        self.ways_back = {}

    def borrow(self, nbytes):
        buffer, idle = self.take(nbytes)
        self.ways_back[buffer.data_ptr(), nbytes] = idle.append
        return buffer

    def give(self, buffer):
        self.ways_back[buffer.data_ptr(), buffer.numel()](buffer)


@pytest.mark.parametrize("take", [Cpu(torch.device("cpu")).empty, BufferPool().take])
def test_no_memory_is_the_error_that_whoever_can_do_without_expects(take):
    """The system tells it as an OSError."""
    with pytest.raises(MemoryError, match=r"the system refused .* of memory"):
        take(2**60)


def test_a_buffer_is_exact_and_comes_again():
    pool = Pool()
    buffer = pool.borrow(1000)
    assert (buffer.numel(), buffer.dtype, buffer.dim()) == (1000, torch.uint8, 1)
    address = buffer.data_ptr()
    pool.give(buffer)
    del buffer
    assert (pool.used_nbytes, pool.idle_nbytes) == (0, 1000)
    again = pool.borrow(1000)
    assert again.data_ptr() == address
    pool.give(again)


@given(st.lists(st.one_of(st.integers(0, 5).map(lambda n: ("take", 100 * n)), st.just(("give", 0)),
                          st.just(("trim", 0))), max_size=60))  # fmt: skip
def test_never_more_than_the_high_water(commands):
    pool, taken, began, high = Pool(), [], 0, 0
    for what, nbytes in commands:
        if what == "take":
            taken.append(pool.borrow(nbytes))
            assert taken[-1].numel() == nbytes
        elif what == "give" and taken:
            pool.give(taken.pop(0))
        used = sum(buffer.numel() for buffer in taken)
        if what == "trim":
            before = pool.used_nbytes + pool.idle_nbytes
            pool.trim()
            began, high = pool.used_nbytes + pool.idle_nbytes, used
            assert began <= before
        high = max(high, used)
        assert pool.used_nbytes == used
        assert used + pool.idle_nbytes <= max(began, high)
        assert pool.idle_nbytes == sum(buffer.numel() for idle in pool._sizes.values() for buffer in idle)
    for buffer in taken:
        pool.give(buffer)
    pool.close()
    assert (pool.used_nbytes, pool.idle_nbytes) == (0, 0)


def test_variable_shapes_do_not_make_it_grow():
    pool = Pool()
    for step in range(200):
        buffers = [pool.borrow(1000 + 7 * step + i) for i in range(4)]
        for buffer in buffers:
            pool.give(buffer)
        assert pool.idle_nbytes <= 4 * (1000 + 7 * step + 3)
        assert len(pool._sizes) <= 8
        if step % 3 == 0:
            pool.trim()


def test_sizes_that_fall_leave_nothing_behind():
    pool = Pool()
    for step in range(100):
        buffers = [pool.borrow(5000 - 7 * step) for _ in range(4 if step % 2 else 3)]
        while buffers:
            pool.give(buffers.pop())
        pool.trim()
        assert len(pool._sizes) <= 3
        assert all(pool._made[nbytes] >= len(idle) > 0 for nbytes, idle in pool._sizes.items())


def test_buffers_that_made_room_are_not_given_up_again():
    pool = Pool()
    buffers = [pool.borrow(100) for _ in range(6)]
    for _ in range(4):
        pool.give(buffers.pop())
    pool.trim()  # four are idle, and two in use
    pool.give(pool.borrow(300))  # takes the place of three of them
    for _ in range(2):
        pool.give(buffers.pop())
    pool.trim()
    assert len(pool._sizes[100]) == 2  # one was idle all the time


def test_a_steady_step_allocates_nothing(monkeypatch):
    pool = Pool()

    def step():
        kept = []
        for i in range(5):
            passing = pool.borrow(50)
            kept.append(pool.borrow(100 + i))
            pool.give(passing)  # also early in the step this drops nothing of what the step needs later
            del passing
        for buffer in kept:
            pool.give(buffer)
        pool.trim()

    step()
    monkeypatch.setattr(pool, "_allocate", None)
    step()


def test_trim_returns_what_the_last_step_did_not_need():
    pool = Pool()
    large, small = pool.borrow(10_000), pool.borrow(100)
    alive = weakref.ref(large)
    pool.give(large)
    pool.give(small)
    del large, small
    pool.trim()
    assert pool.idle_nbytes == 10_100  # the step that ends here needed it
    pool.give(pool.borrow(100))
    pool.trim()
    assert pool.idle_nbytes == 100
    assert alive() is None


def test_close_returns_what_comes_back_later():
    pool = Pool()
    buffer = pool.borrow(100)
    pool.close()
    alive = weakref.ref(buffer)
    pool.give(buffer)
    pool.drain()  # as the tier does that is closed
    del buffer
    assert alive() is None
    assert pool.used_nbytes == 0
    with pytest.raises(StateError, match="Make a new ActivationStore"):
        pool.borrow(100)


def test_threads():
    pool = Pool()

    def work(seed):
        for i in range(200):
            buffers = [pool.borrow(64 * ((seed + i + j) % 4)) for j in range(3)]
            for number, buffer in enumerate(buffers):
                buffer.fill_(10 * seed + number)
            for number, buffer in enumerate(buffers):
                assert (buffer == 10 * seed + number).all()
                pool.give(buffer)
            if i % 20 == 0:
                pool.trim()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert pool.used_nbytes == 0
    assert all(pool._made[nbytes] == len(idle) > 0 for nbytes, idle in pool._sizes.items())


def test_give_from_a_finalizer_while_the_lock_is_held():
    pool = Pool()

    class Owner:
        def __init__(self):
            self.buffer = pool.borrow(100)
            self.me = self  # a cycle: only the collector frees it

        def __del__(self):
            pool.give(self.buffer)

    def collect_inside():
        for close in (False, True):
            Owner()
            if close:
                pool.close()
            with pool._lock:
                gc.collect()

    thread = threading.Thread(target=collect_inside, daemon=True)
    thread.start()
    thread.join(120)
    frame = sys._current_frames().get(thread.ident)
    assert not thread.is_alive(), "deadlock:\n" + "".join(traceback.format_stack(frame))
    assert pool.used_nbytes == 0


def test_a_failed_allocation_is_not_counted(monkeypatch):
    def fail(*size, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    pool = Pool()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fail)
        with pytest.raises(RuntimeError, match="can't allocate"):
            pool.borrow(100)
    assert pool.used_nbytes == 0
    pool.give(pool.borrow(100))
