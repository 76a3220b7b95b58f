"""A pool of host memory that is used again from step to step."""

from __future__ import annotations

from threading import Lock

import torch

from actstore.devices.cpu import map_pages
from actstore.errors import StateError

OWN_PAGES_NBYTES = 64 * 1024  # larger buffers lie outside of the heap, where they would keep freed blocks from merging


class BufferPool:
    """A pool of uint8 buffers of exact sizes. Thread-safe; a buffer comes and goes without a lock.

    `trim` begins a step, and returns the buffers that the last step did not need. Within a step, the bytes of all
    buffers never exceed the larger of two figures: their bytes at its start, and their peak in use. Variable
    shapes so cannot make the pool grow: a new buffer takes the place of idle ones.
    """

    def __init__(self) -> None:
        self._closed = False
        self._lock = Lock()
        self._sizes: dict[int, list[torch.Tensor]] = {}  # idle buffers, by size
        self._made: dict[int, int] = {}  # number of buffers, idle and in use, by size
        self._least: dict[int, int] = {}  # the fewest that were idle at once in this step: it has not needed these
        self._nbytes = 0  # of all buffers, idle and in use
        self._most_nbytes = 0  # limit of `_nbytes` that only buffers in use may raise

    @property
    def used_nbytes(self) -> int:
        return self._nbytes - self.idle_nbytes

    @property
    def idle_nbytes(self) -> int:
        return sum(nbytes * len(idle) for nbytes, idle in list(self._sizes.items()))

    def take(self, nbytes: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Take an uninitialized buffer of exactly `nbytes`, and the list to which the caller appends it afterwards.

        A finalizer may do that. A buffer that comes back after `close` waits for `drain`.

        Raises
        ------
        StateError : the pool is closed
        """
        idle = self._sizes.get(nbytes)
        if idle and not self._closed:
            try:
                buffer = idle.pop()
                left = len(idle)
                if left < self._least.get(nbytes, 0):
                    self._least[nbytes] = left
                return buffer, idle
            except IndexError:  # another thread was faster
                return self._make(nbytes)
            except BaseException:  # an interrupt (Ctrl-C), which comes after a call: the buffer is lost
                with self._lock:
                    self._forget(nbytes)
                raise
        return self._make(nbytes)

    def drain(self) -> None:
        """Free the idle buffers. Safe in finalizers: a thread that already drains checks once more before it ends."""
        while self.idle_nbytes and self._lock.acquire(blocking=False):
            try:
                self._shrink(0)
            finally:
                self._lock.release()

    def trim(self) -> None:
        """Begin a new step: free the buffers that the last step did not need."""
        with self._lock:
            for nbytes, idle in list(self._sizes.items()):
                for _ in range(min(self._least.get(nbytes, 0), len(idle))):
                    self._drop(nbytes, idle)
            self._least = {nbytes: len(idle) for nbytes, idle in self._sizes.items()}
            self._most_nbytes = self._nbytes

    def close(self) -> None:
        """Free the idle buffers, and those that come back from now on."""
        with self._lock:
            self._closed = True
            self._shrink(0)

    def _make(self, nbytes: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        counted = False
        try:
            with self._lock:
                if self._closed:
                    raise StateError("this memory was returned when its store was closed. Make a new ActivationStore.")
                self._shrink(self._most_nbytes - nbytes)
                idle = self._sizes.setdefault(nbytes, [])
                self._count(nbytes)
                counted = True
                self._most_nbytes = max(self._most_nbytes, self._nbytes)
            return self._allocate(nbytes), idle
        except BaseException:
            if counted:
                with self._lock:
                    self._forget(nbytes)
            raise

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes >= OWN_PAGES_NBYTES:
            return torch.frombuffer(map_pages(nbytes), dtype=torch.uint8)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _shrink(self, most: int) -> None:
        """Free idle buffers until all buffers have `most` bytes, or no buffer is idle."""
        for nbytes, idle in list(self._sizes.items()) if self._nbytes > most else ():
            while idle and self._nbytes > most:
                self._drop(nbytes, idle)

    def _drop(self, nbytes: int, idle: list[torch.Tensor]) -> None:
        """Free one idle buffer, unless other threads have taken all."""
        self._forget(nbytes)  # before the call, after which an interrupt (Ctrl-C) may come
        try:
            idle.pop()
        except IndexError:
            self._sizes[nbytes] = idle
            self._count(nbytes)
        self._least[nbytes] = min(self._least.get(nbytes, 0), len(idle))

    def _count(self, nbytes: int) -> None:
        """Count one more buffer of this size."""
        made = self._made.get(nbytes, 0)  # before the rest, as an interrupt comes after a call
        self._nbytes += nbytes
        self._made[nbytes] = made + 1

    def _forget(self, nbytes: int) -> None:
        """Count one buffer of this size less."""
        self._nbytes -= nbytes
        self._made[nbytes] -= 1
        if not self._made[nbytes]:
            del self._made[nbytes], self._sizes[nbytes]
