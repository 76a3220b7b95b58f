"""The disk tier: payloads wait in a nameless file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import torch

from actstore.base.job import Job, finish
from actstore.base.reaper import Reaper
from actstore.base.ticket import JobTicket, Span, Ticket
from actstore.base.units import round_up
from actstore.devices.base import Device, Workers
from actstore.errors import ConfigError, StateError, TransferError
from actstore.tiers.base import Slot, Tier
from actstore.tiers.extents import Extents
from actstore.tiers.file import BLOCK_NBYTES, NamelessFile, warn_if_memory
from actstore.tiers.gpu_direct import GpuDirect
from actstore.tiers.parts import Extent, FileSlot, Mover, split

# Threads for writes, and as many for reads, so reads never queue after writes. Two keep a disk busy; the rest make
# checksums or wait for a busy processor: benchmarks/disk.py shows the loss with fewer.
WORKERS = 4


class DiskTier(Tier):
    """A file in `folder` that worker threads write and read, past the system's page cache where that is possible.

    The file system promises room when it is reserved, so that a full disk shows before any byte is lost.
    Each part of a payload has a checksum, which `read` verifies. A forked child writes to a file of its own. It can
    read payloads that its parent had written before the fork, for as long as the parent keeps them.

    Parameters
    ----------
    folder : an existing writable folder; None for the system's temporary folder
    device : the compute device that payloads come from and go to
    gpu_direct : move them without host memory in between (`tiers/gpu_direct.py`); not in a forked child

    Raises
    ------
    ConfigError : the folder cannot hold a file, or `gpu_direct` cannot work here
    """

    name: ClassVar[str] = "disk"

    def __init__(self, folder: str | os.PathLike[str] | None, device: Device, *, gpu_direct: bool = False) -> None:
        self._folder = Path(folder if folder is not None else tempfile.gettempdir())
        self._device = device
        self._gpu_direct = gpu_direct
        self._streams = device.stream(), device.stream()
        self._lock = Lock()
        self._back = Reaper[Slot](self._lock, self._receive)
        self._open: _Open | None = self._make_open()
        warn_if_memory(self._folder)

    def room(self, nbytes: int) -> int:
        """Return the bytes of the file that a slot of `nbytes` takes."""
        return max(BLOCK_NBYTES, round_up(nbytes, BLOCK_NBYTES))

    @property
    def used_nbytes(self) -> int:
        """Bytes of the file up to the end of the last range in use. A range is in use until its last job is done."""
        with self._lock:
            self._back.drain_locked()
            return 0 if self._open is None else self._open.settle()

    def reserve(self, nbytes: int) -> Slot | None:
        size, slot = self.room(nbytes), None
        try:
            with self._lock:
                here = self._here_locked()
                self._back.drain_locked()
                here.settle()
                slot = here.reserve(nbytes, size)
                return slot
        except BaseException:  # an interrupt (Ctrl-C) as the lock is given back
            if slot is not None:
                self.free(slot)
            raise

    def write(self, slot: Slot, src: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        place: FileSlot = slot.place
        with self._lock:
            here = self._here_locked()
        if place.file is not here.file:
            raise StateError("this slot was reserved before the process was forked. Run forward in one process.")
        after, parts = tuple(after), split(src.numel())
        jobs = _submit(here.writers, here.mover.write, place, parts, (src, after))
        for part, job in zip(parts, jobs, strict=True):
            part.job = job
        with self._lock:
            place.jobs += jobs
        place.parts = parts
        slot.written = JobTicket(jobs)
        return slot.written

    def read(self, slot: Slot, dst: torch.Tensor, after: Iterable[Ticket] = ()) -> Ticket:
        place: FileSlot = slot.place
        copies: list[Ticket] = []
        try:
            with self._lock:
                here = self._here_locked()
            parts = _written_parts(place, dst.numel())
            jobs = _submit(here.readers, here.mover.read, place, parts, (dst, tuple(after), copies))
        except (StateError, TransferError) as error:
            return JobTicket([Job.failed(error)])
        if place.file is here.file:
            with self._lock:
                place.jobs = [job for job in place.jobs if not job.done()] + jobs
        return JobTicket(jobs, copies)

    def free(self, slot: Slot) -> None:
        if not slot.place.dropped:
            slot.place.dropped = True  # an interrupt comes after a call: both lines, or neither
            self._back.put(slot)

    def trim(self) -> None:
        with self._lock:
            here = self._open
            if here is not None and here.file.pid == os.getpid():
                self._back.drain_locked()
                here.settle()
                here.file.shrink(here.high_nbytes)
                here.high_nbytes = here.extents.end

    def close(self) -> None:
        with self._lock:
            here, self._open = self._open, None
        if here is not None:
            here.close()
            self._back.drain()

    def _here_locked(self) -> _Open:
        """Return the file and the workers of this process; a forked child opens its own."""
        if self._open is None:
            raise StateError("the disk tier is closed. Make a new ActivationStore.", folder=str(self._folder))
        if self._open.file.pid != os.getpid():
            if self._gpu_direct:
                raise StateError(
                    "Disk(gpu_direct=True) does not work in a forked child, as nothing of CUDA does: run forward and "
                    "backward in the parent, or start the process by spawn."
                )
            self._open = self._make_open()
        return self._open

    def _make_open(self) -> _Open:
        try:
            file = NamelessFile(self._folder)
        except OSError as error:
            raise ConfigError(
                f"Disk(path={str(self._folder)!r}) cannot hold the disk tier: {error.strerror}. "
                "Give Disk(path) an existing folder that you may write.",
                folder=str(self._folder),
            ) from error
        mover = GpuDirect(self._device, self._streams, file) if self._gpu_direct else Mover(self._device, self._streams)
        return _Open(file, self._device, mover)

    def _receive(self, slot: Slot) -> None:
        if self._open is not None and slot.place.file is self._open.file:  # else closed, or the parent's
            self._open.freed += [slot.place]  # no call, after which an interrupt would make it twice


class _Open:
    """The file, the mover and the workers of one process. Not thread-safe, `close` excepted."""

    def __init__(self, file: NamelessFile, device: Device, mover: Mover) -> None:
        self.file = file
        self.extents = Extents()
        self.high_nbytes = 0  # peak of bytes in use since the last `trim`
        self.freed: list[FileSlot] = []  # given back; jobs may still be at work on them
        self.mover = mover
        self.writers = device.workers(WORKERS, "actstore-disk-write")
        self.readers = device.workers(WORKERS, "actstore-disk-read")

    def reserve(self, nbytes: int, size: int) -> Slot | None:
        """Reserve a range of `size` bytes for a slot; None where the file system has no room."""
        start = self.extents.take(size)
        slot = None
        try:
            if self.file.reserve(self.extents.end):
                slot = Slot(nbytes, place=FileSlot(self.file, start, size))
        finally:
            if slot is None:
                self.extents.give(start, size)
        if self.extents.end > self.high_nbytes:
            self.high_nbytes = self.extents.end
        return slot

    def settle(self) -> int:
        """Free the ranges on which no job runs any more. Return the end of the last range in use."""
        i = 0
        while i < len(self.freed):
            place = self.freed[i]
            if all(job.done() for job in place.jobs) and not place.active:
                self.extents.give(place.start, place.size)
                del self.freed[i]  # an interrupt comes after a call, and so not before this
            else:
                i += 1
        return self.extents.end

    def close(self) -> None:
        """Skip the jobs that have not begun, wait for the rest, and give the bytes back."""
        self.file.closed = True
        if self.file.pid == os.getpid():  # a forked child has no workers
            self.writers.shutdown()
            self.readers.shutdown()
            self.mover.close()
        self.file.close()


def _written_parts(place: FileSlot, nbytes: int) -> Iterable[Extent]:
    if place.parts is None:
        raise StateError("the disk tier was asked for a payload before it was given one. Write the slot first.")
    written = place.parts[-1].end if place.parts else 0
    if nbytes != written:
        raise StateError(f"the disk tier was asked for {nbytes} bytes of a payload of {written}. Read all of it.")
    return place.parts


def _submit(
    workers: Workers, move: Callable[..., Span], place: FileSlot, parts: Iterable[Extent], rest: tuple[Any, ...]
) -> list[Job[Span]]:
    """Submit a job for each part."""
    jobs: list[Job[Span]] = []
    try:
        for part in parts:
            jobs.append(workers.submit(_move, move, place, part, rest))  # noqa: PERF401  # an error leaves those before it
    except BaseException as error:
        finish(jobs)  # until none uses the memory, which the caller may free
        if isinstance(error, StateError):  # closed by another thread, or the interpreter is about to end
            raise StateError(f"the disk tier takes no more work: {error}") from error
        if isinstance(error, RuntimeError):
            raise TransferError(
                f"the disk tier has no thread to work with: {error}. Raise the limit of this process (ulimit -u)."
            ) from error
        raise
    return jobs


def _move(move: Callable[..., Span], place: FileSlot, part: Extent, rest: tuple[Any, ...]) -> Span:
    place.active.append(part)  # before `move` reads `dropped`: `free` sets `dropped` before `settle` reads `active`
    try:
        return move(place, part, *rest)
    finally:
        place.active.remove(part)
