"""Storages that a forward has met, and those of them that plain autograd would hold."""

from __future__ import annotations

from collections import deque

from torch import UntypedStorage

from actstore.base.reaper import Finalizer
from actstore.base.storage import expired, free_weak, hold_weak


class Census:
    """Count of storages, each once. Until `clear`, no new storage gets the identity of one that was met."""

    def __init__(self) -> None:
        self.met: set[int] = set()
        self.counted: set[int] = set()
        self._held: list[int] = []
        self._last = Finalizer(deque(maxlen=0).extend, map(free_weak, self._held))  # reads the list when it runs

    def meet(self, key: int, storage: UntypedStorage) -> None:
        """Keep the identity `key` of `storage` from reuse."""
        if key not in self.met:
            hold_weak(storage)  # first, so that an interrupt leaves one reference too many, never one too few
            self._held.append(key)
            self.met.add(key)

    def count(self, key: int, storage: UntypedStorage) -> int:
        """Return the bytes that plain autograd holds because `storage` is saved now; 0 where it was saved before."""
        if key in self.counted:
            return 0
        self.counted.add(key)
        self.meet(key, storage)
        return storage.nbytes()

    def prune(self) -> set[int]:
        """Forget storages that are freed. Returns their identities."""
        gone = {key for key in self.met if expired(key)}
        self.met -= gone
        self.counted -= gone
        self._held[:] = [key for key in self._held if key not in gone]
        for key in gone:
            free_weak(key)
        return gone

    def clear(self) -> None:
        self.met.clear()
        self.counted.clear()
        while self._held:
            free_weak(self._held.pop())
