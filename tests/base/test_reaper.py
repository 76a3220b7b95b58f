"""What finalizers put is handled later, once, and never under a lock that is taken."""

import gc
import threading

from actstore.base.reaper import Reaper


def test_items_are_handled_once_and_in_order():
    handled = []
    reaper = Reaper(threading.Lock(), handled.append)
    for i in range(3):
        reaper.put(i)
    assert handled == []
    reaper.drain()
    reaper.drain()
    assert handled == [0, 1, 2]


def test_handling_owns_the_lock():
    lock = threading.Lock()
    held = []
    reaper = Reaper(lock, lambda _: held.append(lock.locked()))
    reaper.put(1)
    reaper.drain()
    reaper.put(2)
    reaper.try_drain()
    with lock:
        reaper.put(3)
        reaper.drain_locked()
    assert held == [True] * 3
    assert not lock.locked()


def test_trying_leaves_a_taken_lock_alone():
    handled, lock = [], threading.Lock()
    reaper = Reaper(lock, handled.append)
    reaper.put(1)
    with lock:
        reaper.try_drain()
        assert handled == []
    reaper.try_drain()
    assert handled == [1]


def test_what_comes_while_handling_is_handled_too():
    handled = []

    def handle(item):
        handled.append(item)
        if item < 3:
            reaper.put(item + 1)

    reaper = Reaper(threading.Lock(), handle)
    reaper.put(0)
    reaper.drain()
    assert handled == [0, 1, 2, 3]


def test_a_finalizer_that_runs_while_its_own_thread_holds_the_lock():
    handled, lock = [], threading.Lock()
    reaper = Reaper(lock, handled.append)

    class Cycle:
        def __init__(self):
            self.me = self

        def __del__(self):
            reaper.put(1)
            reaper.try_drain()

    def collect_inside():
        Cycle()
        with lock:
            gc.collect()

    thread = threading.Thread(target=collect_inside, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive(), "deadlock"
    reaper.drain()
    assert handled == [1]


def test_threads_lose_nothing():
    handled = []
    reaper = Reaper(threading.Lock(), handled.append)

    def work(base):
        for i in range(1000):
            reaper.put(base + i)
            if i % 7 == 0:
                reaper.drain()

    threads = [threading.Thread(target=work, args=(10_000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reaper.drain()
    assert sorted(handled) == sorted(10_000 * n + i for n in range(4) for i in range(1000))
