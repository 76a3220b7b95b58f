"""Runs of one kernel over parts of a large tensor, on several threads."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from itertools import pairwise

from actstore.base import cpu_threads
from actstore.base.job import Job, finish
from actstore.devices.workers import Threads
from actstore.errors import StateError

SPLIT_NBYTES = 8 << 20  # below it, one thread is done before a second one has started: a hand-off costs about 100 us
TEAM_NBYTES = 1 << 20  # the same for torch's own threads, which are awake: a hand-off costs about 20 us

_pool: Threads | None = None
_lock = threading.Lock()
_parallel = cpu_threads.find_openmp("GOMP_parallel")
if _parallel is not None:
    _parallel.argtypes, _parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None


def split(run: Callable[..., object], args: tuple[int, ...], units: int) -> None:
    """Call ``run(*args, first, last)`` for consecutive ranges that cover ``range(units)``, and wait for all of them.

    Parameters
    ----------
    run : releases the GIL
    args : the first arguments of every call
    units : number of independent parts (groups of a codec, blocks of a copy)

    Notes
    -----
    Thread-safe, also after a fork. One range per CPU thread of the calling thread, the last on the calling thread.
    """
    parts = min(cpu_threads.number(), units)
    edges = [units * part // parts for part in range(parts + 1)]
    jobs = [Job(run, *args, first, last) for first, last in pairwise(edges[:-1])]
    try:
        for job in jobs:
            _workers().begin(job)
        run(*args, edges[-2], units)
    except BaseException:
        for job in jobs:
            job.cancel(StateError("interrupted"))
        raise
    finally:
        finish(jobs)  # an interrupt must not free the memory that a worker still uses
    for job in jobs:
        job.result()


Ranges = ctypes.c_int64 * 9  # the next unit, five arguments, the number of units, units in a range, the kernel


def split_in_team(work: int, kernel: int, args: tuple[int, int, int, int, int], units: int) -> bool:
    """Run ranges of ``range(units)`` on the OpenMP threads that torch uses; return False without such threads.

    They are awake right after an operator of torch, and a thread of our own would have to share their cores.

    Parameters
    ----------
    work : address of a C function ``void(Ranges *)``, which takes ranges until all are taken
    kernel : address of the kernel as a C function
    """
    threads = cpu_threads.number()
    if _parallel is None or threads == 1:
        return False
    step = -(-units // (4 * threads))  # short ranges: a thread that comes late does less
    _parallel(work, Ranges(0, *args, units, step, kernel), threads, 0)
    return True


def _workers() -> Threads:
    global _pool
    with _lock:
        if _pool is None:
            _pool = Threads(os.cpu_count() or 1, "actstore-kernel")
        return _pool


def _forget_workers() -> None:
    """Drop threads and lock in a forked child, which has neither; OpenMP would wait for its threads for ever."""
    global _pool, _lock, _parallel
    _pool, _lock, _parallel = None, threading.Lock(), None


os.register_at_fork(after_in_child=_forget_workers)
