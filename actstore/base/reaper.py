"""Finalizers of objects, and a queue for the items that they give back.

A finalizer runs at any moment on any thread, also on the thread that holds the lock it would need. It therefore only
appends here, which is atomic. Ordinary code handles the items later, under the lock.

An interrupt (Ctrl-C) that arrives while the main thread computes in C is raised in the first Python function after it.
Where that is a ``__del__``, Python prints the interrupt, forgets it, and the object is never freed. `Finalizer` has
none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Finalizer(partial[object]):
    """An owner of an item that must be given back: ``Finalizer(put, item)`` calls ``put(item)`` when it dies.

    `put` is a function written in C, such as `Reaper.put`: then no Python code runs, and no interrupt comes between.
    """

    __slots__ = ()

    __del__ = partial.__call__


class Reaper(Generic[T]):
    """A queue of items: `put` takes one at any moment, and `drain` gives each to `handle` under `lock`."""

    def __init__(self, lock: Lock, handle: Callable[[T], None]) -> None:
        self._lock = lock
        self._handle = handle
        self.queue: deque[T] = deque()
        self.put = self.queue.append

    def drain(self) -> None:
        """Handle the queued items. Not for finalizers, nor for the owner of the lock."""
        if self.queue:
            with self._lock:
                self.drain_locked()

    def try_drain(self) -> None:
        """Handle the queued items, unless the lock is taken. Safe in finalizers."""
        if self._lock.acquire(blocking=False):
            try:
                self.drain_locked()
            finally:
                self._lock.release()

    def drain_locked(self) -> None:
        """Handle the queued items; the caller owns the lock. What an interrupt (Ctrl-C) ends is done again."""
        while self.queue:
            try:
                self._handle(self.queue[0])
            except Exception:
                self.queue.popleft()
                raise
            self.queue.popleft()
