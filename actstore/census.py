"""Which storages a forward has met, and which of them plain autograd would hold."""

from __future__ import annotations

from torch import UntypedStorage

from actstore.storage import expired, free_weak, hold_weak


class Census:
    """Counts each storage once. Until `clear`, no storage that was met shares its identity with another one."""

    def __init__(self) -> None:
        self.met: set[int] = set()
        self.counted: set[int] = set()

    def meet(self, key: int, storage: UntypedStorage) -> None:
        """Keep the identity `key` of `storage` from being used again."""
        if key not in self.met:
            self.met.add(key)
            hold_weak(storage)

    def count(self, key: int, storage: UntypedStorage) -> int:
        """Bytes that plain autograd holds of `storage` because it is saved now: 0 when it was before."""
        if key in self.counted:
            return 0
        self.counted.add(key)
        if key not in self.met:
            self.met.add(key)
            hold_weak(storage)
        return storage.nbytes()

    def prune(self) -> set[int]:
        """Forget storages that are gone; returns their identities."""
        gone = {key for key in self.met if expired(key)}
        self._forget(gone)
        return gone

    def clear(self) -> None:
        self._forget(set(self.met))

    def __del__(self) -> None:
        self.clear()

    def _forget(self, keys: set[int]) -> None:
        self.met -= keys
        self.counted.difference_update(keys)
        for key in keys:
            free_weak(key)
