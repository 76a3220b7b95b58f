"""Parts of payloads on their way between memory and a file: what the workers of the disk tier do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from actstore.devices.base import Device
from actstore.errors import StateError
from actstore.job import Job
from actstore.snapshot import address_of, view_of
from actstore.ticket import DONE, JobTicket, Span, Ticket
from actstore.tiers.file import BLOCK, NamelessFile, digest
from actstore.tiers.staging import Ring
from actstore.units import round_up


class Part:
    """Bytes [begin, end) of a payload, which one job writes and one job reads. In the file, parts meet between blocks.

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


def split(nbytes: int, lead: int = 0) -> list[Part]:
    """Parts of a payload that begins `lead` into a block; equal up to a block, so that workers share it evenly."""
    end = lead + nbytes
    count = -(-end // Ring.chunk_nbytes)
    step = round_up(-(-end // max(1, count)), BLOCK)
    return [Part(max(0, at - lead), min(at + step, end) - lead) for at in range(0, end if nbytes else 0, max(1, step))]


class Place:
    """Where in which file a payload is, and what is known of it.

    Attributes
    ----------
    lead : bytes of the first block that come before the payload, so that it lies in its blocks as in its pages
    parts : None until a write has begun
    jobs : writes and reads that may still run
    active : the parts that threads are at work on now, also where an interrupt has lost the job
    dropped : nobody will read the bytes: what has not begun need not be done
    """

    __slots__ = ("active", "dropped", "file", "jobs", "lead", "parts", "size", "start")

    def __init__(self, file: NamelessFile, start: int, size: int) -> None:
        self.file = file
        self.start = start
        self.size = size
        self.lead = 0
        self.parts: Sequence[Part] | None = None
        self.jobs: list[Job[Span]] = []
        self.active: list[Part] = []
        self.dropped = False


class Mover:
    """Moves parts, on the threads that call it. Thread-safe.

    Memory of the host is read and written where it is, as far as `NamelessFile.direct` allows: a payload may begin in
    the middle of a page, and then does in the middle of a block. The rest crosses a chunk of the ring. Before a job
    takes a chunk it waits for other jobs, such as the write of its part, so that these can have one.

    Parameters
    ----------
    streams : of `device`, for what leaves its memory and what comes back
    """

    def __init__(self, device: Device, streams: tuple[Any, Any]) -> None:
        self._device = device
        self._offload, self._fetch = streams
        self._waits = device.on_host  # the thread waits for `after`, before the span begins; else a stream does
        self.ring = Ring(device)

    def close(self) -> None:
        """Return what it holds; no job runs any more."""
        self.ring.close()

    def write(self, place: Place, part: Part, src: torch.Tensor, after: Sequence[Ticket]) -> Span:
        """Write a part of the payload `src`, after all of `after`, and remember its checksum.

        Raises
        ------
        TransferError : the file system refused, or the copy failed
        """
        begin = perf_counter_ns()
        if not place.dropped and not place.file.closed:
            src = src[part.begin : part.end]
            begin, after = self._wait(after)
            part.digest = self._write(place.file, src, place.start + place.lead + part.begin, after)
        return begin, perf_counter_ns()

    def read(self, place: Place, part: Part, dst: torch.Tensor, after: Sequence[Ticket], copies: list[Ticket]) -> Span:
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
            raise StateError("the bytes were not on disk yet when this process was forked; run backward in the parent")
        dst = dst[part.begin : part.end]
        begin, after = self._wait(after)
        copies.append(self._read(place.file, dst, place.start + place.lead + part.begin, part.digest, after))
        return begin, perf_counter_ns()

    def _wait(self, after: Sequence[Ticket]) -> tuple[int, Sequence[Ticket]]:
        """Make this thread wait for what no stream can wait for, before it holds a chunk; when that was over, and what
        is left to the stream.
        """
        rest = []
        for ticket in after:
            if ticket.on_stream and not self._waits:
                rest.append(ticket)
            else:
                ticket.wait_on(None)
        return perf_counter_ns(), rest

    def _write(self, file: NamelessFile, src: torch.Tensor, start: int, after: Sequence[Ticket]) -> int:
        """Write `src` from the byte `start` on; its checksum."""
        if self._device.on_host:
            return self._write_host(file, src, start)
        return self._write_device(file, src, start, after)

    def _read(
        self, file: NamelessFile, dst: torch.Tensor, start: int, expected: int, after: Sequence[Ticket]
    ) -> Ticket:
        """Fill `dst` from the byte `start` on, with bytes of the checksum `expected`; complete when it is filled."""
        if self._device.on_host:
            self._read_host(file, dst, start, expected)
            return DONE
        return self._read_device(file, dst, start, expected, after)

    def _write_host(self, file: NamelessFile, src: torch.Tensor, start: int) -> int:
        view = view_of(src)
        found = digest(view)
        with self._pieces(file, view, address_of(src), start) as (views, bounced):
            for there, here in bounced:
                np.copyto(np.asarray(here), np.asarray(there))
            file.write(views, start // BLOCK * BLOCK if bounced else start)
        return found

    def _read_host(self, file: NamelessFile, dst: torch.Tensor, start: int, expected: int) -> None:
        view: memoryview = dst.numpy().data
        with self._pieces(file, view, dst.data_ptr(), start) as (views, bounced):
            first = start // BLOCK * BLOCK if bounced else start
            file.read(views, first, start + len(view) - first)
            for there, here in bounced:
                np.copyto(np.asarray(there), np.asarray(here))
        file.verify(view, expected)

    @contextmanager
    def _pieces(
        self, file: NamelessFile, view: memoryview, address: int, start: int
    ) -> Iterator[tuple[list[memoryview], list[tuple[memoryview, memoryview]]]]:
        """What the system moves for `view`, which is at `address`, to or from the byte `start` on.

        Yields
        ------
        views : memory that it may move. Whole blocks, where any of `view` is bounced
        bounced : parts of `view`, and in which parts of `views` they are instead
        """
        end = len(view)
        head, tail = -start % BLOCK, (start + end) % BLOCK
        if not file.direct or (address % BLOCK == head == tail == 0):
            yield [view], []
            return
        chunk = self.ring.take()
        try:
            if (address - start) % BLOCK or head + tail >= end:  # all of it
                lead = start % BLOCK
                yield [chunk.view[: round_up(lead + end, BLOCK)]], [(view, chunk.view[lead : lead + end])]
                return
            first, last = chunk.view[:BLOCK], chunk.view[BLOCK : 2 * BLOCK]
            views, bounced = [view[head : end - tail]], []
            if head:
                views.insert(0, first)
                bounced.append((view[:head], first[BLOCK - head :]))
            if tail:
                views.append(last)
                bounced.append((view[end - tail :], last[:tail]))
            yield views, bounced
        finally:
            self.ring.give(chunk)

    def _write_device(self, file: NamelessFile, src: torch.Tensor, start: int, after: Sequence[Ticket]) -> int:
        chunk = self.ring.take()
        copied: Ticket = DONE
        try:
            nbytes = src.numel()
            copied = self._device.copy(chunk.memory[:nbytes], src, self._offload, after)
            copied.result()
            found = digest(chunk.view[:nbytes])
            file.write([chunk.view[: round_up(nbytes, BLOCK)]], start)
        finally:
            self.ring.give(chunk, copied)
        return found

    def _read_device(
        self, file: NamelessFile, dst: torch.Tensor, start: int, expected: int, after: Sequence[Ticket]
    ) -> Ticket:
        chunk = self.ring.take()
        copied: Ticket = DONE
        try:
            nbytes = dst.numel()
            file.read([chunk.view[: round_up(nbytes, BLOCK)]], start, nbytes)
            file.verify(chunk.view[:nbytes], expected)
            copied = self._device.copy(dst, chunk.memory[:nbytes], self._fetch, after)
        finally:
            self.ring.give(chunk, copied)
        return copied
