"""Parts of payloads on their way between memory and a file: staging memory, and the work of the disk tier's threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from time import perf_counter_ns
from typing import Any, ClassVar

import numpy as np
import torch

from actstore.base.job import Job
from actstore.base.ticket import DONE, JobTicket, Span, Ticket
from actstore.base.units import round_up
from actstore.devices.base import Device
from actstore.devices.cpu import Cpu
from actstore.errors import ActstoreError, StateError
from actstore.tiers.file import BLOCK_NBYTES, NamelessFile, digest


class Chunk:
    """Page-aligned host memory.

    Attributes
    ----------
    memory : `Ring.chunk_nbytes` of uint8
    view : the same bytes, for system calls
    busy : ticket of the device's copy that uses the chunk
    """

    __slots__ = ("busy", "memory", "pinned", "view")

    def __init__(self, memory: torch.Tensor, pinned: bool) -> None:
        self.memory = memory
        self.view: memoryview = memory.numpy().data
        self.pinned = pinned
        self.busy: Ticket = DONE

    def settle(self) -> None:
        """Make the host wait until no copy uses it."""
        with suppress(ActstoreError):  # a failed copy is over too, and its own ticket raises the error
            self.busy.wait_on(None)
        self.busy = DONE


class Ring:
    """A ring of chunks, each made when first needed. Thread-safe.

    No job waits here for another job, so that jobs cannot deadlock. A job holds one chunk at most, and the ring has as
    many chunks as jobs that run at a time. A chunk that no job holds waits at most for the device.

    Attributes
    ----------
    chunk_nbytes : bytes of one system call; larger calls are not faster
    chunks : limit of the number of chunks: one for each worker that reads or writes
    """

    chunk_nbytes: ClassVar[int] = 8 * 2**20
    chunks: ClassVar[int] = 8

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = Lock()
        self._all: list[Chunk] = []
        self._idle: list[Chunk] = []  # the longest idle first

    def take(self) -> Chunk:
        """Take a chunk that is not in use; the host waits for the device if it uses all of them.

        Raises
        ------
        MemoryError : the system has no more memory
        """
        with self._lock:
            chunk = next((chunk for chunk in self._idle if chunk.busy.ready()), None)
            if chunk is None and self._idle and len(self._all) >= self.chunks:
                chunk = self._idle[0]
            if chunk is None:
                chunk = self._make()
            else:
                self._idle.remove(chunk)
        chunk.settle()
        return chunk

    def give(self, chunk: Chunk, busy: Ticket = DONE) -> None:
        """Take back a chunk, which a copy uses until `busy` is complete."""
        chunk.busy = busy
        with self._lock:
            self._idle.append(chunk)

    def close(self) -> None:
        """Return the memory; no job runs any more."""
        with self._lock:
            chunks, self._all, self._idle = self._all, [], []
        for chunk in chunks:
            chunk.settle()
            if chunk.pinned:
                self._device.unpin(chunk.memory)

    def _make(self) -> Chunk:
        memory = self._device.pinned(self.chunk_nbytes)
        pinned = memory is not None
        if memory is None:
            memory = Cpu(torch.device("cpu")).empty(self.chunk_nbytes)
        chunk = Chunk(memory, pinned)
        self._all.append(chunk)
        return chunk


class Extent:
    """Bytes [begin, end) of a payload, which one job writes and one job reads. `begin` is a multiple of a block.

    Attributes
    ----------
    digest : its checksum; None until the bytes are in the file
    job : the write
    """

    __slots__ = ("begin", "digest", "end", "job")

    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        self.end = end
        self.digest: int | None = None
        self.job: Job[Span] | None = None


def split(nbytes: int) -> list[Extent]:
    """Split a payload into parts, equal up to a block, so that several workers share it evenly."""
    count = -(-nbytes // Ring.chunk_nbytes)
    step = round_up(-(-nbytes // max(1, count)), BLOCK_NBYTES)
    return [Extent(begin, min(begin + step, nbytes)) for begin in range(0, nbytes, max(1, step))]


class FileSlot:
    """The range of a file where a payload is, its parts, and the jobs on it.

    Attributes
    ----------
    parts : None until a write has begun
    jobs : writes and reads that may still run
    active : the parts on which threads work now, also where an interrupt has lost the job
    dropped : whether the slot was freed: then no reader wants the bytes, and jobs that have not begun do nothing
    """

    __slots__ = ("active", "dropped", "file", "jobs", "parts", "size", "start")

    def __init__(self, file: NamelessFile, start: int, size: int) -> None:
        self.file = file
        self.start = start
        self.size = size
        self.parts: Sequence[Extent] | None = None
        self.jobs: list[Job[Span]] = []
        self.active: list[Extent] = []
        self.dropped = False


class Mover:
    """The copies of parts between memory and a file, on the threads that call it. Thread-safe.

    The system reads and writes host memory in place, as far as `NamelessFile.direct` allows; the rest crosses a chunk
    of the ring. Before a job takes a chunk it waits for other jobs, such as the write of its part, so that these can
    have one. A checksum is made after the write: bytes that a processor has just read lie in its cache, from where they
    reach the disk more slowly (by 5 % of a write, benchmarks/disk.py).

    Parameters
    ----------
    streams : two streams of `device`: for copies from its memory, and for copies back
    """

    def __init__(self, device: Device, streams: tuple[Any, Any]) -> None:
        self._device = device
        self._offload, self._fetch = streams
        self._waits = device.on_host  # the thread waits for `after`, before the span begins; else a stream does
        self.ring = Ring(device)

    def close(self) -> None:
        """Return the chunks of the ring; no job runs any more."""
        self.ring.close()

    def write(self, place: FileSlot, part: Extent, src: torch.Tensor, after: Sequence[Ticket]) -> Span:
        """Write a part of the payload `src`, after all of `after`, and record its checksum.

        Raises
        ------
        TransferError : the file system refused, or the copy failed
        """
        begin = perf_counter_ns()
        if not place.dropped and not place.file.closed:
            src = src[part.begin : part.end]
            begin, after = self._wait(after)
            part.digest = self._write(place.file, src, place.start + part.begin, after)
        return begin, perf_counter_ns()

    def read(
        self, place: FileSlot, part: Extent, dst: torch.Tensor, after: Sequence[Ticket], copies: list[Ticket]
    ) -> Span:
        """Fill a part of `dst`, after the write of the part and all of `after`; or queue a copy and add it to `copies`.

        Raises
        ------
        TransferError, PayloadError, StateError : as `Tier.read`
        """
        begin = perf_counter_ns()
        if place.dropped:
            return begin, begin
        if part.job is not None and place.file.pid == os.getpid():
            JobTicket([part.job]).result()
        place.file.check_open()
        if part.digest is None:
            raise StateError("the bytes were not on disk yet when this process was forked. Run backward in the parent.")
        dst = dst[part.begin : part.end]
        begin, after = self._wait(after)
        copies.append(self._read(place.file, dst, place.start + part.begin, part.digest, after))
        return begin, perf_counter_ns()

    def _wait(self, after: Sequence[Ticket]) -> tuple[int, Sequence[Ticket]]:
        """Make this thread wait for the tickets that no stream can wait for, before it holds a chunk.

        Returns
        -------
        int : the end of that wait
        Sequence[Ticket] : the tickets that the stream is to wait for
        """
        rest = []
        for ticket in after:
            if ticket.on_stream and not self._waits:
                rest.append(ticket)
            else:
                ticket.wait_on(None)
        return perf_counter_ns(), rest

    def _write(self, file: NamelessFile, src: torch.Tensor, start: int, after: Sequence[Ticket]) -> int:
        """Write `src` from the byte `start` on, and return its checksum."""
        if self._device.on_host:
            return self._write_host(file, src, start)
        return self._write_device(file, src, start, after)

    def _read(
        self, file: NamelessFile, dst: torch.Tensor, start: int, expected: int, after: Sequence[Ticket]
    ) -> Ticket:
        """Fill `dst` from the byte `start` on, and verify the checksum. Return a ticket, complete when it is filled."""
        if self._device.on_host:
            self._read_host(file, dst, start, expected)
            return DONE
        return self._read_device(file, dst, start, expected, after)

    def _write_host(self, file: NamelessFile, src: torch.Tensor, start: int) -> int:
        view: memoryview = src.numpy().data
        body = _in_place_nbytes(file, src)
        if body == len(view):
            file.write([view], start)
            return digest(view)
        chunk = self.ring.take()
        try:
            np.copyto(chunk.memory[: len(view) - body].numpy(), src[body:].numpy())
            rest = chunk.view[: round_up(len(view) - body, BLOCK_NBYTES)]
            file.write([view[:body], rest] if body else [rest], start)
        finally:
            self.ring.give(chunk)
        return digest(view)

    def _read_host(self, file: NamelessFile, dst: torch.Tensor, start: int, expected: int) -> None:
        view: memoryview = dst.numpy().data
        body = _in_place_nbytes(file, dst)
        if body == len(view):
            file.read([view], start, len(view))
        else:
            chunk = self.ring.take()
            try:
                rest = chunk.view[: round_up(len(view) - body, BLOCK_NBYTES)]
                file.read([view[:body], rest] if body else [rest], start, len(view))
                np.copyto(dst[body:].numpy(), chunk.memory[: len(view) - body].numpy())
            finally:
                self.ring.give(chunk)
        file.verify(view, expected)

    def _write_device(self, file: NamelessFile, src: torch.Tensor, start: int, after: Sequence[Ticket]) -> int:
        chunk = self.ring.take()
        copied: Ticket = DONE
        try:
            nbytes = src.numel()
            copied = self._device.copy(chunk.memory[:nbytes], src, self._offload, after)
            copied.result()
            file.write([chunk.view[: round_up(nbytes, BLOCK_NBYTES)]], start)
            return digest(chunk.view[:nbytes])
        finally:
            self.ring.give(chunk, copied)

    def _read_device(
        self, file: NamelessFile, dst: torch.Tensor, start: int, expected: int, after: Sequence[Ticket]
    ) -> Ticket:
        chunk = self.ring.take()
        copied: Ticket = DONE
        try:
            nbytes = dst.numel()
            file.read([chunk.view[: round_up(nbytes, BLOCK_NBYTES)]], start, nbytes)
            file.verify(chunk.view[:nbytes], expected)
            copied = self._device.copy(dst, chunk.memory[:nbytes], self._fetch, after)
        finally:
            self.ring.give(chunk, copied)
        return copied


def _in_place_nbytes(file: NamelessFile, memory: torch.Tensor) -> int:
    """Return the number of first bytes that the system may move to or from `memory` itself."""
    nbytes = memory.numel()
    if not file.direct:
        return nbytes
    return 0 if memory.data_ptr() % BLOCK_NBYTES else nbytes // BLOCK_NBYTES * BLOCK_NBYTES
