"""The ranks of a group as places of bytes: each rank serves its own, and any rank reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from socket import gethostname
from typing import Any

import torch.distributed as dist

from actstore.errors import ConfigError, TransferError
from actstore.tiers.calls import TimedCalls

CHUNK_NBYTES = 4 * 2**20  # a value of a TCPStore is below 8 MiB

_THREAD = "actstore-group-call"
_MARGIN_S = 1.0  # a TCPStore ends a call after `wait_s`, but waits for its answer to that

_made = Counter[str]()  # times that this process has met the ranks of a group, by the ranks


class Peers:
    """The ranks of a group. Each has a `TCPStore` of its own, whose thread serves the bytes that the rank put there.

    That thread is native: a rank answers while its Python waits, computes, or unwinds an exception. A `TCPStore` would
    wait for ever for a process that the system has stopped: calls to other ranks end by a deadline. A call waits for an
    earlier one, so each thread that may wait has its own `Peers`, by `again`.

    Parameters
    ----------
    group : the process group; all of its ranks meet, equally often
    wait_s : the most seconds that a call waits for another rank

    Attributes
    ----------
    ranks : of the group, in the job
    rank : of this process, in the job
    lost : the errors of ranks that no longer answer, by rank
    """

    def __init__(self, group: Any, wait_s: float) -> None:
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        self.rank = dist.get_rank()
        self.ranks = list(dist.get_process_group_ranks(group))
        self.wait_s = wait_s
        self.lost: dict[int, str] = {}
        self._most = timedelta(seconds=wait_s)
        self._calls = TimedCalls(_THREAD)
        own = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=self._most)
        name = "-".join(map(str, self.ranks))
        board = PrefixStore(f"actstore/group/{name}/{_made[name]}", _get_default_store())
        _made[name] += 1
        board.set(str(self.rank), f"{gethostname()} {own.port}")
        self._addresses: dict[int, tuple[str, int]] = {}
        self._stores = {self.rank: own}
        for rank in self.ranks:
            try:
                board.wait([str(rank)], self._most)
            except RuntimeError as error:
                raise ConfigError(
                    f"Group(wait_s={wait_s}): rank {rank} has made no store in this time. Make the store on all ranks "
                    "of the group.",
                    rank=rank,
                ) from error
            host, port = board.get(str(rank)).decode().split()
            self._addresses[rank] = ("localhost" if host == gethostname() else host, int(port))
        self._connect()

    def again(self) -> Peers:
        """Return the same ranks for another thread."""
        other = object.__new__(Peers)
        other.__dict__ = {**self.__dict__, "_stores": {}, "_calls": TimedCalls(_THREAD)}
        other._connect()
        return other

    def _connect(self) -> None:
        for rank, address in self._addresses.items():
            if rank not in self._stores:
                self._stores[rank] = self._within(rank, partial(_connect, address, self._most))

    def put(self, name: str, value: bytes) -> None:
        """Put a value where this rank serves it."""
        self._ask(self.rank, "set", name, value)

    def has(self, rank: int, name: str) -> bool:
        """Return whether a rank serves a value."""
        return bool(self._ask(rank, "check", [name]))

    def get(self, rank: int, name: str) -> bytes:
        """Return a value of a rank.

        Raises
        ------
        TransferError : the rank no longer answers, or serves no such value within `wait_s`
        """
        found: bytes = self._ask(rank, "get", name)
        return found

    def count(self, rank: int, name: str) -> int:
        """Add 1 to a number of a rank. Returns the sum."""
        return int(self._ask(rank, "add", name, 1))

    def drop(self, rank: int, names: Iterable[str]) -> None:
        """Remove values of a rank."""
        for name in names:
            self._ask(rank, "delete_key", name)

    def close(self) -> None:
        """End the connections, and the service of this rank where this is not made by `again`."""
        self._calls.end(self.wait_s)
        self._stores.clear()

    def _ask(self, rank: int, call: str, *args: Any) -> Any:
        return self._within(rank, lambda: getattr(self._stores[rank], call)(*args))

    def _within(self, rank: int, call: Callable[[], Any]) -> Any:
        """Return what a call to a rank returns, within `wait_s`."""
        if rank in self.lost:
            raise TransferError(self.lost[rank], rank=rank)
        try:
            return call() if rank == self.rank else self._calls.make(call, wait_s=self.wait_s + _MARGIN_S)
        except (RuntimeError, KeyError, TimeoutError) as error:  # a KeyError: closed meanwhile
            raise self._gone(rank, error) from error

    def _gone(self, rank: int, error: Exception) -> TransferError:
        if isinstance(error, TimeoutError):
            text = (
                f"rank {rank} has not answered in {self.wait_s} s: its process is stopped, or its machine is out of "
                f"reach. Look at rank {rank}, and start all ranks again, or raise Group(wait_s)."
            )
        else:
            late = isinstance(error, dist.DistStoreError)
            why = f"has served no slice in {self.wait_s} s" if late else "no longer answers"
            text = f"rank {rank} {why}, and its slices are gone. Look for the error of rank {rank}: it has ended first."
        self.lost.setdefault(rank, text)
        return TransferError(self.lost[rank], rank=rank)


def _connect(address: tuple[str, int], most: timedelta) -> Any:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=most)
