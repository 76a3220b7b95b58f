"""Values that the ranks of a group write for each other."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from time import monotonic, sleep
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

MIN_POLL_INTERVAL_S, MAX_POLL_INTERVAL_S = 0.001, 0.05

_opened = Counter[str]()  # stores of this process, by the ranks of their group


class GroupStore:
    """Values by name, in the key-value store with which the process group was initialized.

    No call is a collective: none needs another rank to make one. The n-th stores that the ranks of a group make are the
    same store.

    Parameters
    ----------
    group : the process group; all of its ranks make the store
    wait_s : timeout of `wait` in seconds

    Attributes
    ----------
    rank : of this process, in the job
    ranks : of the group, in the job
    """

    def __init__(self, group: Any, wait_s: float) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        self.rank = dist.get_rank()
        self.ranks = sorted(dist.get_process_group_ranks(group))
        self._wait_s = wait_s
        name = "-".join(map(str, self.ranks))
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store from start to start
        self._store = PrefixStore(f"actstore/{start}/{name}/{_opened[name]}", _get_default_store())
        _opened[name] += 1

    def put(self, name: str, value: Any) -> None:
        """Write a value."""
        self._store.set(name, json.dumps(value))

    def has(self, names: Iterable[str]) -> bool:
        """Return whether all of the values have been written."""
        wanted = list(names)
        return not wanted or self._store.check(wanted)

    def read(self, name: str) -> Any:
        """Return a value; None where it has not been written."""
        return json.loads(self._store.get(name)) if self.has([name]) else None

    def settle(self, name: str, value: Any) -> Any:
        """Write a value that no rank has written before. Return the one that is there now, the same for all ranks."""
        return json.loads(self._store.compare_set(name, "", json.dumps(value)))

    def drop(self, names: Iterable[str]) -> None:
        """Remove values that no rank reads again."""
        for name in names:
            self._store.delete_key(name)

    def wait(self, find: Callable[[], T | None]) -> T | None:
        """Return what `find` finds as soon as it does; None where it finds nothing in `wait_s` seconds."""
        end, interval = monotonic() + self._wait_s, MIN_POLL_INTERVAL_S
        while (found := find()) is None and monotonic() < end:
            sleep(interval)
            interval = min(2 * interval, MAX_POLL_INTERVAL_S)
        return found
