"""Copies of one simulated device: out to host memory or to the disk, and back, in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from actstore.plan.hardware import Hardware
from actstore.plan.solver.chain import Links
from benchmarks.simulator.lanes import Clock, Lane, Pool
from benchmarks.simulator.passes import ROUNDING_TOLERANCE, Gates, Pass


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of a payload.

    Attributes
    ----------
    nbytes : bytes on the device
    host : bytes in host memory from when it leaves until its backward has run
    disk : bytes in host memory on the way to the disk and back from it, and on the disk until its backward has run
    wanted : the backward that reads it
    microbatch : of that backward
    gate : the pass that must have ended before the chunk may come back; -1 for none
    written : whether it is on the disk
    ready : whether the last copy, to the device, may begin
    """

    nbytes: float
    host: float
    disk: float
    wanted: int
    microbatch: int
    gate: int
    written: bool = False
    ready: bool = False


class Node:
    """Node of one pipeline stage, shared by its ranks: rates, and memory with its peak."""

    def __init__(self, links: Links) -> None:
        self.out, self.back = Pool(links.out), Pool(links.back)
        self.write, self.read = Pool(links.disk_out), Pool(links.disk_back)
        self.host = self.host_peak = 0.0
        self.disk = self.disk_peak = 0.0

    def use(self, host: float, disk: float) -> None:
        """Take bytes; negative numbers free them."""
        self.host += host
        self.disk += disk
        self.host_peak, self.disk_peak = max(self.host_peak, self.host), max(self.disk_peak, self.disk)


class Copies:
    """The four lanes of a device, each in order: out, write to the disk, read from it, back.

    Parameters
    ----------
    limit, host_limit : bytes of the device, and of its share of host memory
    count : chunks of a payload
    window : upper bound of bytes prefetched, or read ahead into host memory
    ended : callback after each copy

    Attributes
    ----------
    backlog : bytes on the device that have to leave
    ahead : bytes that are back, or in transit, for passes that have not begun
    host : bytes in host memory
    outgoing : chunks that have to leave; the one in transit stays in front
    missing : for each pass, the number of its chunks that are not back
    """

    def __init__(
        self,
        clock: Clock,
        node: Node,
        hardware: Hardware,
        passes: Sequence[Pass],
        limit: float,
        host_limit: float,
        count: int,
        window: float,
        ended: Callable[[], None],
    ) -> None:
        links = hardware.links
        self.out, self.back = Lane(clock, links.out, node.out), Lane(clock, links.back, node.back)
        self.write, self.read = Lane(clock, links.disk_out, node.write), Lane(clock, links.disk_back, node.read)
        self.out.slowed_by((self.back,), hardware.both_ways)
        self.back.slowed_by((self.out,), hardware.both_ways)
        self.write.slowed_by((self.read,), links.disk_both_ways)
        self.read.slowed_by((self.write,), links.disk_both_ways)
        self._leaves, self._comes = (self.write, self.read) if links.on_host else (self.out, self.back)
        self._clock, self._node, self._ended = clock, node, ended
        self._on_host, self._latency = links.on_host, hardware.latency
        self._limit, self._host_limit, self._window = limit, host_limit, window
        self.backlog = self.ahead = self.host = self._staged = 0.0
        self.outgoing: deque[Chunk] = deque()
        self._to_write: deque[Chunk] = deque()
        self._to_read: deque[Chunk] = deque()
        self._to_fetch: deque[Chunk] = deque()
        self.missing = [0] * len(passes)
        self._chunks: dict[tuple[int, int], list[Chunk]] = {}
        gates = Gates(limit)
        for index, step in enumerate(passes):
            if step.backward and step.payload:
                self._cut(index, step, gates, count)
            gates.ran(index, step)

    def _cut(self, index: int, step: Pass, gates: Gates, count: int) -> None:
        nbytes, disk = step.payload / count, step.option.disk / count
        host = 0.0 if self._on_host else step.option.host / count
        made = [Chunk(nbytes, host, disk, index, step.microbatch, gate) for gate in gates.payload([nbytes] * count)]
        self._chunks[step.microbatch, step.layer] = made[::-1]  # the chunk that left last comes back first
        self.missing[index] = count
        self._to_fetch.extend(made)
        if disk and not self._on_host:
            self._to_read.extend(made)

    @property
    def settled(self) -> bool:
        """True where everything that has to leave has arrived at its tier."""
        return not self.outgoing and not self._to_write

    def leave(self, step: Pass) -> None:
        """Queue the payload of a forward that has run."""
        if step.payload:
            self.backlog += step.payload
            self.outgoing.extend(self._chunks[step.microbatch, step.layer])

    def used(self, step: Pass) -> None:
        """Free the payload of a backward that has run."""
        self._take(0.0 if self._on_host else -step.option.host, -step.option.disk)

    def begin(self, cursor: int, backward: int | None, base: float, early: float) -> None:
        """Begin what can begin now.

        Parameters
        ----------
        cursor : the pass that runs, or the next one
        backward : microbatch of the pass `cursor` if it is a backward: only its chunks may come back; None for none
        base : bytes on the device that are not counted here
        early : the same for what a later pass wants: if none runs, with what the next one needs, so that what comes
            early never takes the room of a pass that waits for copies to leave
        """
        self._send()
        if not self.write.busy and self._to_write:
            self._copy(self.write, self._to_write[0].disk, self._written)
        if backward is not None:
            self._load(cursor, backward)
            self._fetch(cursor, backward, base, early)

    def _send(self) -> None:
        if self._leaves.busy or not self.outgoing:
            return
        chunk = self.outgoing[0]
        if not self._on_host:
            if self.host + chunk.host + chunk.disk > self._host_limit:
                return
            self._take(chunk.host + chunk.disk, 0.0)
        self._copy(self._leaves, chunk.nbytes, self._sent)

    def _sent(self) -> None:
        chunk = self.outgoing.popleft()
        self.backlog = self.backlog - chunk.nbytes if self.outgoing else 0.0
        if self._on_host:
            self._take(0.0, chunk.disk)
        elif chunk.disk:
            self._to_write.append(chunk)
        chunk.ready = self._on_host or not chunk.disk
        self._ended()

    def _written(self) -> None:
        chunk = self._to_write.popleft()
        chunk.written = True
        self._take(-chunk.disk, chunk.disk)
        self._ended()

    def _load(self, cursor: int, backward: int) -> None:
        if self.read.busy or not self._to_read:
            return
        chunk = self._to_read[0]
        if not chunk.written or chunk.microbatch != backward:
            return
        if self.host + chunk.disk <= self._host_limit and self._admits(
            self._staged, chunk.disk, chunk.wanted == cursor
        ):
            self._staged += chunk.disk
            self._take(chunk.disk, 0.0)
            self._copy(self.read, chunk.disk, self._loaded)

    def _loaded(self) -> None:
        self._to_read.popleft().ready = True
        self._ended()

    def _fetch(self, cursor: int, backward: int, base: float, early: float) -> None:
        if self._comes.busy or not self._to_fetch:
            return
        chunk = self._to_fetch[0]
        if chunk.microbatch != backward:
            return
        wanted = chunk.wanted == cursor
        if not chunk.ready or cursor <= chunk.gate or not self._admits(self.ahead, chunk.nbytes, wanted):
            return
        if (base if wanted else early) + self.backlog + self.ahead + chunk.nbytes <= self._limit:
            self.ahead += chunk.nbytes
            self._copy(self._comes, chunk.nbytes, self._fetched)

    def _fetched(self) -> None:
        chunk = self._to_fetch.popleft()
        self.missing[chunk.wanted] -= 1
        if chunk.disk and not self._on_host:
            self._staged -= chunk.disk
            self._take(-chunk.disk, 0.0)
        self._ended()

    def _admits(self, nbytes: float, more: float, wanted: bool) -> bool:
        """Return whether the window has room; it always has for a chunk that compute waits for, or that is alone."""
        return wanted or nbytes + more <= self._window or nbytes < more * ROUNDING_TOLERANCE

    def _take(self, host: float, disk: float) -> None:
        self.host += host
        self._node.use(host, disk)

    def _copy(self, lane: Lane, nbytes: float, done: Callable[[], None]) -> None:
        start = self._latency * lane.rate if lane.rate < inf else 0.0  # expressed in bytes
        self._clock.start(lane, nbytes + start, done)
