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
_LOOKUP_S = 20.0  # PyTorch looks up the name of each address for its messages: 5 s and more where DNS does not answer

_made = Counter[str]()  # times that this process has met the ranks of a group, by the ranks


class Peers:
    """The ranks of a group. Each has a `TCPStore` of its own, whose thread serves the bytes that the rank put there.

    That thread is native: a rank answers while its Python waits, computes, or unwinds an exception. A `TCPStore` would
    wait for ever for a process that the system has stopped: calls to other ranks end by a deadline. A call waits for an
    earlier one, so each thread that may wait has its own `Peers`, by `again`.

    Parameters
    ----------
    group : the process group; all of its ranks meet, equally often
    wait_s : the most seconds that a call waits for another rank; the first one takes longer where names are looked up

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
        self._meet_s = wait_s + _LOOKUP_S
        meet = timedelta(seconds=self._meet_s)
        own = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=meet)
        own.set_timeout(self._most)
        name = "-".join(map(str, self.ranks))
        self._board = PrefixStore(f"actstore/group/{name}/{_made[name]}", _get_default_store())
        _made[name] += 1
        self._addresses: dict[int, tuple[str, int]] = {}
        self._stores = {self.rank: own}
        for rank, address in self._swap("address", f"{gethostname()} {own.port}").items():
            host, port = address.split()
            self._addresses[rank] = ("localhost" if host == gethostname() else host, int(port))
        self._connect()

    def meet(self) -> None:
        """Wait until all ranks have come here: on some of them, connecting has taken longer.

        Raises
        ------
        ConfigError : a rank has not come
        """
        self._swap("met", "")

    def _swap(self, name: str, value: str) -> dict[int, str]:
        """Return the value of each rank, once all have given theirs."""
        self._board.set(f"{name}/{self.rank}", value)
        found = {}
        for rank in self.ranks:
            try:
                self._board.wait([f"{name}/{rank}"], timedelta(seconds=self._meet_s))
            except RuntimeError as error:
                raise ConfigError(
                    f"Group(wait_s={self.wait_s}): rank {rank} has made no store in {self._meet_s} s. Make the store "
                    "on all ranks of the group.",
                    rank=rank,
                ) from error
            found[rank] = self._board.get(f"{name}/{rank}").decode()
        return found

    def again(self) -> Peers:
        """Return the same ranks for another thread."""
        other = object.__new__(Peers)
        other.__dict__ = {**self.__dict__, "_stores": {}, "_calls": TimedCalls(_THREAD)}
        other._connect()
        return other

    def _connect(self) -> None:
        for rank, address in self._addresses.items():
            if rank not in self._stores:
                connect = partial(_connect, address, self._meet_s)
                self._stores[rank] = store = self._within(rank, connect, self._meet_s)
                store.set_timeout(self._most)

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
        return self._within(rank, lambda: getattr(self._stores[rank], call)(*args), self.wait_s)

    def _within(self, rank: int, call: Callable[[], Any], wait_s: float) -> Any:
        """Return what a call to a rank returns, within `wait_s`."""
        if rank in self.lost:
            raise TransferError(self.lost[rank], rank=rank)
        try:
            return call() if rank == self.rank else self._calls.make(call, wait_s=wait_s + _MARGIN_S)
        except (RuntimeError, KeyError, TimeoutError) as error:  # a KeyError: closed meanwhile
            raise self._gone(rank, error, wait_s) from error

    def _gone(self, rank: int, error: Exception, wait_s: float) -> TransferError:
        if isinstance(error, TimeoutError):
            text = (
                f"rank {rank} has not answered in {wait_s} s: its process is stopped, or its machine is out of "
                f"reach. Look at rank {rank}, and start all ranks again, or raise Group(wait_s)."
            )
        else:
            late = isinstance(error, dist.DistStoreError)
            why = f"has served no slice in {wait_s} s" if late else "no longer answers"
            text = f"rank {rank} {why}, and its slices are gone. Look for the error of rank {rank}: it has ended first."
        self.lost.setdefault(rank, text)
        return TransferError(self.lost[rank], rank=rank)


def _connect(address: tuple[str, int], wait_s: float) -> Any:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=wait_s))
