"""Runs one kernel over parts of a large tensor on several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise

import torch

SPLIT_NBYTES = 8 << 20  # below, one thread is done before a second one has started: a hand-off costs about 100 us

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def split(run: Callable[..., object], args: tuple[int, ...], units: int) -> None:
    """Call ``run(*args, first, last)`` for consecutive ranges that cover ``range(units)``, and wait for all of them.

    Parameters
    ----------
    run : releases the GIL and never raises
    args : what every call gets first
    units : how many independent parts there are (groups of a codec, blocks of a copy)

    Notes
    -----
    Thread-safe, also after a fork. One range per thread of `torch.get_num_threads()`, the last on the calling thread.
    """
    parts = min(torch.get_num_threads(), units)
    edges = [units * part // parts for part in range(parts + 1)]
    futures: list[Future[object]] = []
    try:
        for first, last in pairwise(edges[:-1]):
            futures.append(_workers().submit(run, *args, first, last))
        run(*args, edges[-2], units)
    finally:
        wait(futures)  # an interrupt must not free the memory that a worker still uses


def _workers() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="actstore-kernel")
        return _pool


def _forget_workers() -> None:
    """A forked child has neither the threads nor a usable lock."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_workers)
