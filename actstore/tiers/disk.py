"""The disk tier: payloads wait in a nameless file."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import ClassVar

import torch

from actstore.errors import ConfigError, StateError
from actstore.reaper import Reaper
from actstore.ticket import DONE, FutureTicket, Ticket
from actstore.tiers.base import Slot, Tier
from actstore.tiers.extents import Extents
from actstore.tiers.file import NamelessFile, warn_if_memory
from actstore.tiers.host import HostTier
from actstore.tiers.staging import Staging

BLOCK = 4096  # ranges start at multiples of a page


class DiskTier(Tier):
    """A file in `folder`, written by one worker thread and read by the thread that asks.

    Room is promised by the file system when it is reserved, so that a full disk is seen before any byte is lost.
    Each payload carries a CRC-32, which `read` verifies. A forked child writes to a file of its own, and can read what
    its parent had written before the fork for as long as the parent keeps it.

    Parameters
    ----------
    folder : an existing folder that can be written; None for the system's temporary folder
    staging : memory that takes the payload off an accelerator before it is written; None where the device is the CPU

    Raises
    ------
    ConfigError : the folder cannot hold a file
    """

    name: ClassVar[str] = "disk"

    def __init__(self, folder: str | os.PathLike[str] | None, staging: HostTier | None) -> None:
        self._folder = Path(folder if folder is not None else tempfile.gettempdir())
        self._staging = None if staging is None else Staging(staging)
        self._lock = Lock()
        self._back = Reaper[Slot](self._lock, self._receive)
        self._high_nbytes = 0  # the most that was in use since the last `trim`
        self._file: NamelessFile | None = self._open()
        warn_if_memory(self._folder)

    def reserve(self, nbytes: int) -> Slot | None:
        size = max(1, -(-nbytes // BLOCK)) * BLOCK
        with self._lock:
            if self._file is None:
                raise StateError("the disk tier is closed", folder=str(self._folder))
            if self._file.pid != os.getpid():
                self._file = self._open()
            self._back.drain_locked()
            start = self._extents.take(size)
            found = False
            try:
                found = self._file.reserve(self._extents.end)
            finally:
                if not found:
                    self._extents.give(start, size)
            self._high_nbytes = max(self._high_nbytes, self._extents.end)
            return Slot(nbytes, place=_Place(self._file, start, size)) if found else None

    def write(self, slot: Slot, src: torch.Tensor) -> Ticket:
        staging, place = self._staging, slot.place
        if staging is None:
            slot.written = FutureTicket(self._submit(place, src, DONE))
            return slot.written
        stage = staging.enter(slot.nbytes)
        try:
            copied = staging.tier.write(stage, src)
            future = self._submit(place, stage.memory, copied)
        except BaseException:
            staging.leave(stage)
            raise
        future.add_done_callback(lambda _: staging.leave(stage))
        slot.written = FutureTicket(future, copied)
        return slot.written

    def read(self, slot: Slot, dst: torch.Tensor) -> Ticket:
        place: _Place = slot.place
        if place.file.pid == os.getpid():
            slot.written.result()
        if dst.device.type == "cpu":
            place.read(dst)
            return DONE
        assert self._staging is not None
        host = self._staging.tier
        stage = host.reserve(slot.nbytes)
        try:
            host.settle(stage)
            place.read(stage.memory)
            return host.read(stage, dst)
        finally:
            host.free(stage)  # the copy may still run: the next owner of the memory waits for it

    def free(self, slot: Slot) -> None:
        slot.place.dropped = True
        self._back.put(slot)

    def trim(self) -> None:
        with self._lock:
            if self._file is not None and self._file.pid == os.getpid():
                self._back.drain_locked()
                self._file.shrink(self._high_nbytes)
                self._high_nbytes = self._extents.end
        if self._staging is not None:
            self._staging.tier.trim()

    def close(self) -> None:
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.closed = True  # what is not written yet is skipped
            if file.pid == os.getpid():
                self._worker.shutdown()
            file.close()
            self._back.drain()
        if self._staging is not None:
            self._staging.tier.close()

    def _open(self) -> NamelessFile:
        try:
            file = NamelessFile(self._folder)
        except OSError as error:
            raise ConfigError(
                f"disk_path={str(self._folder)!r} cannot hold the disk tier: {error.strerror}; "
                "give disk_path= an existing folder that you may write",
                folder=str(self._folder),
            ) from error
        self._extents = Extents()
        self._high_nbytes = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="actstore-disk")
        return file

    def _submit(self, place: _Place, src: torch.Tensor, copied: Ticket) -> Future[None]:
        try:
            place.future = self._worker.submit(place.write, src, copied)
        except RuntimeError as error:  # closed by another thread, or the interpreter is about to end
            raise StateError(f"the disk tier takes no more writes: {error}") from error
        return place.future

    def _receive(self, slot: Slot) -> None:
        place: _Place = slot.place
        if place.file is not self._file:
            return  # its file was closed, or is the parent's
        if place.future is None or place.future.done():
            self._extents.give(place.start, place.size)
        else:  # no range is used again while its writer is at work
            place.future.add_done_callback(lambda _: self._back.put(slot))


class _Place:
    """Where in which file, and what is known of the bytes there."""

    __slots__ = ("crc", "dropped", "file", "future", "size", "start")

    def __init__(self, file: NamelessFile, start: int, size: int) -> None:
        self.file = file
        self.start = start
        self.size = size
        self.crc: int | None = None  # until the bytes are written
        self.dropped = False  # nobody will read the bytes: they need not be written any more
        self.future: Future[None] | None = None

    def write(self, src: torch.Tensor, copied: Ticket) -> None:
        if not self.dropped and not self.file.closed:
            copied.result()
            self.crc = self.file.write(src.numpy().data, self.start)

    def read(self, dst: torch.Tensor) -> None:
        if self.file.closed:
            raise StateError("the disk tier was closed, and its bytes are gone")
        if self.crc is None:
            raise StateError("the bytes were not on disk yet when this process was forked; run backward in the parent")
        self.file.read(dst.numpy().data, self.start, self.crc)
