"""A queue that finalizers may use.

A finalizer runs at any moment on any thread, also on the thread that holds the lock it would need. It therefore only
appends here; the item is handled at once when the lock is free, and otherwise by the lock's owner when it next drains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Reaper(Generic[T]):
    """Hands items to `handle` under `lock`, never blocking and never nested."""

    def __init__(self, lock: Lock, handle: Callable[[T], None]) -> None:
        self._lock = lock
        self._handle = handle
        self._queue: deque[T] = deque()

    def put(self, item: T) -> None:
        self._queue.append(item)
        self.drain()

    def drain(self) -> None:
        """Handle what is queued, unless another owner of the lock is at work: it drains when it is done."""
        while self._queue and self._lock.acquire(blocking=False):
            try:
                item = self._queue.popleft() if self._queue else None
                if item is not None:
                    self._handle(item)
            finally:
                self._lock.release()

    def __bool__(self) -> bool:
        return bool(self._queue)
