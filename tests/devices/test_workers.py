"""Threads and their jobs: in order, intact after an interrupt at any moment, and never waited for in vain."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from weakref import ref

import pytest

from actstore.base.job import Job, finish
from actstore.devices.workers import Threads
from actstore.errors import StateError, TransferError
from tests.system.interrupts import Moments

ROOT = Path(__file__).parents[2]
WAIT = 30


class Thing:
    pass


@pytest.fixture
def threads():
    before = set(threading.enumerate())
    made = Threads(2, "test-worker")
    yield made
    made.shutdown()
    assert set(threading.enumerate()) <= before


def test_jobs_return_and_raise(threads):
    def fail():
        raise ValueError("now")

    jobs = [threads.submit(pow, 2, n) for n in range(20)]
    failed = threads.submit(fail)
    assert [job.result() for job in jobs] == [2**n for n in range(20)]
    assert [job.exception() for job in jobs] == [None] * 20
    with pytest.raises(ValueError, match="now"):
        failed.result()
    assert failed.done()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_thread_survives_what_a_job_raises(threads, kind):
    def fail():
        raise kind("now")

    errors = [threads.submit(fail).exception() for _ in range(5)]
    assert [type(error) for error in errors] == [kind] * 5
    assert threads.submit(pow, 2, 3).result() == 8


def test_jobs_begin_in_the_order_of_their_submission():
    threads, begun = Threads(1, "test-worker"), []
    finish([threads.submit(begun.append, n) for n in range(100)])
    assert begun == list(range(100))
    threads.shutdown()


def test_threads_run_side_by_side(threads):
    both = threading.Barrier(2)
    jobs = [threads.submit(both.wait, WAIT) for _ in range(2)]
    assert sorted(job.result() for job in jobs) == [0, 1]


def test_nothing_of_a_job_lives_on(threads):
    """Neither what it worked on, nor the frames that it failed in, causes included."""

    def fail(thing):
        here = Thing()
        try:
            there.append(ref(here))
            raise OSError(thing is None)
        except OSError as error:
            raise ValueError("now") from error

    there = []
    for call in (lambda thing: None, fail):
        thing = Thing()
        there.append(ref(thing))
        job = threads.submit(call, thing)
        del thing
        job.exception()
        assert [one() for one in there] == [None] * len(there)
    assert job.exception().__traceback__ is not None


def test_shutdown_waits_for_all_jobs(threads):
    go, done = threading.Event(), []
    threads.submit(go.wait, WAIT)
    for n in range(10):
        threads.submit(done.append, n)
    closer = threading.Thread(target=threads.shutdown)
    closer.start()
    go.set()
    closer.join(WAIT)
    assert sorted(done) == list(range(10))
    for _ in range(2):
        with pytest.raises(StateError, match="no job can begin after shutdown"):
            threads.submit(pow, 2, 3)
        threads.shutdown()


def test_threads_that_nobody_can_use_end():
    threads = Threads(3, "test-orphan")
    assert threads.submit(pow, 2, 3).result() == 8
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("test-orphan")]
    assert len(mine) == 3
    del threads
    gc.collect()
    for thread in mine:
        thread.join(WAIT)
        assert not thread.is_alive()


def test_a_system_without_threads(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    threads = Threads(2, "test-worker")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.submit(pow, 2, 3)
    assert threads.submit(pow, 2, 3).result() == 8
    threads.shutdown()


@pytest.mark.parametrize("begun", [False, True])
def test_a_thread_that_died_is_told(monkeypatch, begun):
    """Of a job that it had begun, and of one that only it could have run."""
    monkeypatch.setattr("actstore.base.job.POLL_INTERVAL_S", 0.01)
    dead = threading.Thread(target=int)
    dead.start()
    dead.join()
    job = Job(pow, 2, 3)
    if begun:
        job.runner = dead
    else:
        job.crew = [dead]
    assert isinstance(job.exception(), TransferError)
    assert job.done()
    job.run()
    assert isinstance(job.exception(), TransferError)  # as it was told


def test_who_cancels_first_wins():
    job = Job(pow, 2, 3)
    assert job.cancel(StateError("no"))
    job.run()
    with pytest.raises(StateError, match="no"):
        job.result()
    job = Job(pow, 2, 3)
    job.run()
    assert not job.cancel(StateError("no"))
    assert job.result() == 8


def outside_tests(frame):
    """What the package runs of Python's library can be interrupted too."""
    return "/tests/" not in frame.f_code.co_filename


def use(threads):
    jobs = [threads.submit(pow, 2, n) for n in range(2)]
    finish(jobs)
    assert [job.result() for job in jobs] == [1, 2]


def interrupt(act, at):
    """Let threads do something with an interrupt at one moment, and then work and end as if there had been none."""
    threads = Threads(2, "test-worker")
    if act is not use:
        use(threads)
    moments = Moments(outside_tests, at)
    try:
        with moments:
            act(threads)
    except KeyboardInterrupt:
        assert moments.where
    with suppress(StateError):  # after shutdown
        use(threads)
    threads.shutdown()
    return moments


@pytest.mark.parametrize("act", [use, Threads.shutdown])
def test_an_interrupt_at_each_moment(act):
    """Nothing stays locked, whoever waits."""
    before = set(threading.enumerate())
    most = max(interrupt(act, None).count for _ in range(5))
    reached = sum(bool(interrupt(act, at).where) for at in range(1, most + 10))  # a wait takes more or fewer
    assert reached >= most / 2 > 2
    for thread in set(threading.enumerate()) - before:  # that an interrupted start has left to itself
        thread.join(WAIT)
        assert not thread.is_alive()


def test_a_forked_child_makes_its_own():
    script = """
import os, sys
from actstore.devices.workers import Threads
from actstore.errors import StateError
threads = Threads(2, "test-worker")
assert threads.submit(pow, 2, 3).result() == 8
child = os.fork()
if child == 0:
    try:
        threads.submit(pow, 2, 3)
    except StateError as error:
        assert "The child makes its own" in str(error)
        threads.shutdown()
        own = Threads(2, "test-worker")
        sys.exit(own.submit(pow, 2, 3).result())  # with all that an exit does
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
assert threads.submit(pow, 2, 3).result() == 8
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_end_of_the_interpreter():
    """It waits for the job that runs, cancels the others, and takes no more."""
    script = """
import atexit, os, threading
def late():
    try:
        threads.submit(pow, 2, 3)
    except RuntimeError as error:
        os.write(1, str(error).encode() + b"; ")
    os.write(1, str(waiting.exception()).encode())
atexit.register(late)
from actstore.devices.workers import Threads
threads = Threads(1, "test-worker")
inside, go = threading.Event(), threading.Event()
def work():
    inside.set()
    go.wait(120)
    os.write(1, b"worked; ")
running, waiting = threads.submit(work), threads.submit(os.write, 1, b"never")
assert inside.wait(120)
cancel = threads._cancel
threads._cancel = lambda why: (cancel(why), go.set())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "worked; no job can begin after interpreter shutdown.; this had not begun at interpreter shutdown."
    )
