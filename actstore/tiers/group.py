"""The group tier: what is equal on all ranks of a process group is stored once, in slices.

A payload has as many slices as the group has ranks. A rank *posts* a payload: it puts the slice of its own number where
the other ranks can read it, and a fingerprint of each slice. It lets the rest go once it has seen the same fingerprints
from all ranks. Until then, and where they differ, the whole payload stays on the device.

No two ranks need to do anything in the same order, or at the same time:

1. a payload is named by the number of the step and its number in the step, so all ranks store the same number of them;
2. native threads serve what is posted (`Peers`). A read asks for slices that are there, because no rank lets go before
   all have posted. So no read waits for the Python of another rank, and ranks read in any order;
3. the main thread never waits in forward for more than the checks of payloads that it has itself stored. The rank that
   is last finds all of these posted, and continues;
4. a slice is removed when all ranks have freed the payload: each adds 1 to a number beside it, and the last one removes
   it. Where a rank has gone on to another step without the payload, no rank has let it go, and each removes its own;
5. a rank that has died ends each call to it at once, and one that does not post a payload ends its check within
   `wait_s`, by an error with the number of the rank. No slice is of use then, and each rank removes its own as it frees
   them. So does one that does not answer within `wait_s`: the system has stopped it, with its native threads.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from socket import gethostname
from threading import Lock
from time import monotonic, perf_counter_ns, sleep
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from actstore.base.job import Job
from actstore.base.ticket import JobTicket, Span, Ticket
from actstore.errors import ActstoreError, ConfigError, PayloadError, ReplicaError, StateError, TransferError
from actstore.tiers.base import Slot, Tier
from actstore.tiers.calls import CallThread, TimedCalls
from actstore.tiers.device import too_late

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


MIN_POLL_INTERVAL_S, MAX_POLL_INTERVAL_S = 0.0005, 0.02
DIGEST_NBYTES = 16
STEP = "step"  # name of the value that says in which step a rank is
CLOSED = 2**62  # the step of a rank that has closed its store


class Replica:
    """A payload that all ranks of a group have.

    Attributes
    ----------
    step, name : of the step, and of the payload among those of all steps
    prints : the fingerprint of each slice, after the length in bytes
    posted : its bytes are read no more
    ended : the check of it has ended; with `everywhere`, all ranks have posted it
    freed, released : its slot was given back; its slices were, too
    reads : the number of reads that have begun; its slices stay until these have ended
    """

    __slots__ = (
        "begin_ns",
        "ended",
        "error",
        "everywhere",
        "freed",
        "job",
        "name",
        "nbytes",
        "posted",
        "prints",
        "reads",
        "released",
        "step",
    )

    def __init__(self) -> None:
        self.name = ""
        self.step = self.nbytes = self.begin_ns = self.reads = 0
        self.prints = b""
        self.posted = self.ended = self.everywhere = self.freed = self.released = False
        self.error: ActstoreError | None = None
        self.job: Job[Span] = Job(self._end)

    def _end(self) -> Span:
        if self.error is not None:
            raise self.error
        return self.begin_ns, perf_counter_ns()


class GroupTier(Tier):
    """The memory of all ranks of a process group, for payloads that are equal on all of them.

    Slices wait in the memory of the process that serves them. On an accelerator that is host memory, and `write` waits
    for the copy there.

    Parameters
    ----------
    group : the process group; all of its ranks make the tier, equally often
    wait_s : the most seconds to wait for another rank
    on_host : whether the compute device is the CPU, so that slices count as held there

    Raises
    ------
    ConfigError : another rank has made no tier within `wait_s`, and the time to look up names
    """

    name: ClassVar[str] = "group"
    alone = True

    def __init__(self, group: Any, wait_s: float, *, on_host: bool) -> None:
        self._peers = peers = Peers(group, wait_s)
        self._own = peers.ranks.index(peers.rank)
        self._on_host = on_host
        self._posts, self._checks, self._reads, self._frees = (
            CallThread(f"actstore-group-{word}") for word in ("post", "check", "read", "free")
        )
        self._checking, self._reading, self._freeing = peers.again(), peers.again(), peers.again()
        peers.meet()
        self._step = self._serial = 0
        self._replicas: dict[str, Replica] = {}  # replicas whose slice this rank may serve
        self._closed = False
        self._pid = os.getpid()
        self._lock = Lock()

    def room(self, nbytes: int) -> int:
        return -(-nbytes // len(self._peers.ranks))

    def held_nbytes(self, nbytes: int) -> int:
        start, stop = self._bounds(nbytes)[self._own]
        return stop - start if self._on_host else 0

    def reserve(self, nbytes: int) -> Slot | None:
        self._require_open()
        return Slot(nbytes, place=Replica())

    def write(self, slot: Slot, src: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        for ticket in after:
            ticket.result()
        host = src if src.device.type == "cpu" else src.cpu()
        replica: Replica = slot.place
        with self._lock:
            self._require_open()
            replica.step, replica.name, replica.nbytes = self._step, f"{self._step}.{self._serial}", src.numel()
            self._serial += 1
            replica.begin_ns = perf_counter_ns()
            self._replicas[replica.name] = replica
            self._posts.give(partial(self._post, replica, host))
        slot.written = JobTicket([replica.job])
        return slot.written

    def read(self, slot: Slot, dst: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        replica: Replica = slot.place
        with self._lock:
            if self._closed or self._pid != os.getpid():
                return too_late(self.name)
            job = Job(self._gather, replica, dst, (slot.written, *after))
            self._reads.give(job.run)
        return JobTicket([job])

    def free(self, slot: Slot) -> None:
        replica: Replica = slot.place
        replica.freed = True
        if replica.name:
            self._frees.give(partial(self._release, replica))

    def trim(self) -> None:
        """Begin a step: the payloads of all ranks are numbered from 0 again."""
        with self._lock:
            if not self._closed and self._pid == os.getpid():
                self._step, self._serial = self._step + 1, 0
                self._posts.give(partial(self._tell_step, self._step))

    def close(self) -> None:
        """Free all payloads, and wait until the other ranks have no more use for the slices of this one.

        The wait ends after `wait_s` seconds, and at once where a rank has died.
        """
        with self._lock:
            closed, self._closed = self._closed, True
        if closed or self._pid != os.getpid():
            return
        self._posts.give(partial(self._tell_step, CLOSED))
        for thread in (self._posts, self._reads, self._checks):
            thread.end(self._peers.wait_s)
        for replica in list(self._replicas.values()):
            replica.freed = True
            self._frees.give(partial(self._release, replica))
        until = monotonic() + self._peers.wait_s
        while self._replicas and monotonic() < until:
            sleep(MAX_POLL_INTERVAL_S)
            self._frees.give(self._sweep)
        self._frees.end(self._peers.wait_s)
        for peers in (self._freeing, self._reading, self._checking, self._peers):
            peers.close()

    # -- threads ------------------------------------------------------------------------------------------------------

    def _post(self, replica: Replica, host: torch.Tensor) -> None:
        """Put this rank's slice, and the fingerprints, where other ranks read them."""
        try:
            memory = memoryview(host.numpy())  # type: ignore[arg-type]  # an array has a buffer
            bounds = self._bounds(replica.nbytes)
            digests = (_digest(memory[start:stop]) for start, stop in bounds)
            replica.prints = replica.nbytes.to_bytes(8, "little") + b"".join(digests)
            start, stop = bounds[self._own]
            for i, (a, b) in enumerate(_chunks(start, stop)):
                self._peers.put(f"{replica.name}/{i}", bytes(memory[a:b]))
            self._peers.put(f"{replica.name}/prints", replica.prints)
        except BaseException as error:
            replica.error = error if isinstance(error, ActstoreError) else TransferError(str(error))
            self._end(replica)
            return
        replica.posted = True
        if replica.freed:
            replica.job.run()  # the check goes on without its bytes
        self._checks.give(partial(self._check, replica))

    def _tell_step(self, step: int) -> None:
        try:
            self._peers.put(STEP, step.to_bytes(8, "little"))
        except ActstoreError:
            return  # this rank's own service has ended: reads of other ranks say so
        self._frees.give(self._sweep)

    def _check(self, replica: Replica) -> None:
        """Compare the fingerprints of all ranks, and end the write."""
        try:
            others = {rank: self._prints_of(replica, rank) for rank in self._peers.ranks if rank != self._peers.rank}
            replica.everywhere = True
            for rank, prints in others.items():
                if prints != replica.prints:
                    raise self._difference(replica, rank, prints)
        except ActstoreError as error:
            replica.error = error
        self._end(replica)

    def _end(self, replica: Replica) -> None:
        replica.ended = True
        replica.job.run()
        self._frees.give(partial(self._release, replica))

    def _prints_of(self, replica: Replica, rank: int) -> bytes:
        name = f"{replica.name}/prints"
        until, interval = monotonic() + self._peers.wait_s, MIN_POLL_INTERVAL_S
        while not self._checking.has(rank, name):
            sleep(interval)
            interval = min(2 * interval, MAX_POLL_INTERVAL_S)
            if self._step_of(rank) > replica.step and not self._checking.has(rank, name):
                raise TransferError(
                    f"rank {rank} has gone on to another step without this tensor. Run the same forward on all ranks "
                    "of the group, and enter the store equally often.",
                    rank=rank,
                )
            if monotonic() > until:
                self._peers.lost[rank] = (
                    f"rank {rank} has not stored its copy in {self._peers.wait_s} s. Look for the error of rank "
                    f"{rank}, or raise Group(wait_s)."
                )
        return self._checking.get(rank, name)

    def _step_of(self, rank: int) -> int:
        return int.from_bytes(self._checking.get(rank, STEP), "little") if self._checking.has(rank, STEP) else 0

    def _difference(self, replica: Replica, rank: int, prints: bytes) -> ReplicaError:
        nbytes, ranks = int.from_bytes(prints[:8], "little"), (self._peers.rank, rank)
        if nbytes != replica.nbytes:
            what = f"{replica.nbytes} and {nbytes} bytes"
        else:
            bounds = self._bounds(nbytes)
            own, other = (_split(each) for each in (replica.prints, prints))
            parts = [f"{start} to {stop}" for (start, stop), a, b in zip(bounds, own, other, strict=True) if a != b]
            what = f"of {nbytes} bytes those from {' and '.join(parts)} differ"
        return ReplicaError(
            f"ranks {ranks[0]} and {ranks[1]} have different tensors: {what}. Give the module a policy without group, "
            "or find out why its input is not the same on all ranks.",
            ranks=ranks,
        )

    def _gather(self, replica: Replica, dst: torch.Tensor, after: Iterable[Ticket]) -> Span:
        """Read all slices, and check each against its fingerprint; none of a payload that was freed before."""
        begin = perf_counter_ns()
        with self._lock:
            if replica.freed:
                return begin, begin
            replica.reads += 1
        try:
            for ticket in after:
                ticket.result()
            return self._read_slices(replica, dst)
        finally:
            with self._lock:
                replica.reads -= 1
            self._frees.give(partial(self._release, replica))

    def _read_slices(self, replica: Replica, dst: torch.Tensor) -> Span:
        begin = perf_counter_ns()
        if dst.numel() != replica.nbytes:
            raise StateError(f"group: {dst.numel()} bytes were asked for, of a payload of {replica.nbytes}. Read all.")
        host = dst if dst.device.type == "cpu" else torch.empty(dst.shape, dtype=dst.dtype)
        memory = memoryview(host.numpy())  # type: ignore[arg-type]
        bounds = self._bounds(replica.nbytes)
        for rank, (start, stop), wanted in zip(self._peers.ranks, bounds, _split(replica.prints), strict=True):
            for i, (a, b) in enumerate(_chunks(start, stop)):
                memory[a:b] = self._reading.get(rank, f"{replica.name}/{i}")
            if _digest(memory[start:stop]) != wanted:
                raise PayloadError(
                    f"the slice of rank {rank} came back with another fingerprint than it had. Report this.",
                    rank=rank,
                )
        if host is not dst:
            dst.copy_(host)
        return begin, perf_counter_ns()

    def _release(self, replica: Replica) -> None:
        """Give back the slices of a payload once it is freed, and its check has ended."""
        if replica.freed and replica.posted:
            replica.job.run()
        with self._lock:
            if not (replica.freed and replica.ended) or replica.released or replica.reads:
                return
            replica.released = True
        if not replica.everywhere:
            self._remove(replica)
            return
        for rank in self._peers.ranks:
            try:
                if self._freeing.count(rank, f"{replica.name}/freed") == len(self._peers.ranks):
                    self._freeing.drop(rank, self._names(replica, self._peers.ranks.index(rank)))
                    if rank == self._peers.rank:
                        self._replicas.pop(replica.name, None)
            except ActstoreError:
                self._sweep()  # a rank has died

    def _sweep(self) -> None:
        """Forget the payloads that all ranks have released. Where a rank has died, remove all that this rank has."""
        for replica in [each for each in self._replicas.values() if each.released]:
            if self._peers.lost:
                self._remove(replica)
            elif not self._freeing.has(self._peers.rank, f"{replica.name}/prints"):
                self._replicas.pop(replica.name, None)

    def _remove(self, replica: Replica) -> None:
        self._replicas.pop(replica.name, None)
        if self._peers.rank not in self._peers.lost:
            self._freeing.drop(self._peers.rank, self._names(replica, self._own))

    def _names(self, replica: Replica, index: int) -> list[str]:
        chunks = len(_chunks(*self._bounds(replica.nbytes)[index]))
        return [f"{replica.name}/{word}" for word in (*range(chunks), "freed", "prints")]

    def _bounds(self, nbytes: int) -> list[tuple[int, int]]:
        """Return the range of bytes of each slice."""
        each = self.room(nbytes)
        return list(pairwise(min(i * each, nbytes) for i in range(len(self._peers.ranks) + 1)))

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("the group tier is closed. Make a new ActivationStore.")
        if self._pid != os.getpid():
            raise StateError("the group tier does not work in a forked child. Start the process by spawn.")


def _chunks(start: int, stop: int) -> list[tuple[int, int]]:
    return [(a, min(a + CHUNK_NBYTES, stop)) for a in range(start, stop, CHUNK_NBYTES)]


def _digest(memory: memoryview) -> bytes:
    return blake2b(memory, digest_size=DIGEST_NBYTES).digest()


def _split(prints: bytes) -> list[bytes]:
    return [prints[i : i + DIGEST_NBYTES] for i in range(8, len(prints), DIGEST_NBYTES)]
