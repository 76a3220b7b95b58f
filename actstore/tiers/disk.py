"""The disk tier: payloads wait in a file that has no name, and so is gone with the process, however it ends."""

from __future__ import annotations

import errno
import os
import tempfile
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import ClassVar

import torch

from actstore.errors import ConfigError, PayloadError, TransferError
from actstore.reaper import Reaper
from actstore.ticket import DONE, FutureTicket, Ticket
from actstore.tiers.base import Slot, Tier
from actstore.tiers.extents import Extents
from actstore.units import format_nbytes

BLOCK = 4096  # ranges start at multiples of a page


class _File:
    """One nameless file, the worker that writes it, and the process that owns them."""

    def __init__(self, folder: Path) -> None:
        self.fd = _open_nameless(folder)
        self.pid = os.getpid()
        self.extents = Extents()
        self.length = 0  # bytes that the file system has promised
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="actstore-disk")

    def grow(self, nbytes: int) -> bool:
        """Have the file system promise `nbytes`; False when it is full."""
        if nbytes <= self.length:
            return True
        try:
            os.posix_fallocate(self.fd, self.length, nbytes - self.length)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return False
            raise
        self.length = nbytes
        return True

    def close(self) -> None:
        if self.pid == os.getpid():
            self.worker.shutdown(wait=True, cancel_futures=True)
        os.close(self.fd)


class DiskTier(Tier):
    """A file in `folder`, written by one worker thread and read by the thread that asks.

    Room is promised by the file system when it is reserved, so that a full disk is seen before any byte is lost.
    Each payload carries a CRC-32, which `read` verifies. A forked child writes to a file of its own.

    Parameters
    ----------
    folder : an existing folder that can be written
    staging : memory that takes the payload off an accelerator before it is written; None where the device is the CPU
    """

    name: ClassVar[str] = "disk"

    def __init__(self, folder: str | os.PathLike[str] | None, staging: Tier | None) -> None:
        self._folder = Path(folder if folder is not None else tempfile.gettempdir())
        self._staging = staging
        self._lock = Lock()
        self._back = Reaper[Slot](self._lock, self._receive)
        self._file: _File | None = _create(self._folder)
        _warn_if_memory(self._folder)

    def reserve(self, nbytes: int) -> Slot | None:
        with self._lock:
            self._back.drain_locked()
            if self._file is None:
                raise TransferError("the disk tier is closed", folder=str(self._folder))
            if self._file.pid != os.getpid():
                self._file = _create(self._folder)
            file = self._file
            size = -(-nbytes // BLOCK) * BLOCK
            start = file.extents.take(size)
            if not file.grow(file.extents.end):
                file.extents.give(start, size)
                return None
        return Slot(nbytes, place=_Place(file, start, size))

    def write(self, slot: Slot, src: torch.Tensor) -> Ticket:
        place: _Place = slot.place
        if self._staging is None:
            slot.written = FutureTicket(place.file.worker.submit(_write, place, src))
            return slot.written
        stage = self._staging.reserve(slot.nbytes)
        if stage is None or stage.buffer is None:
            raise TransferError(
                f"no staging memory for {format_nbytes(slot.nbytes)} on the way to disk; raise host_budget="
            )
        copied = self._staging.write(stage, src)
        future = place.file.worker.submit(_write_staged, place, stage.buffer, copied)
        future.add_done_callback(lambda _: self._free_stage(stage))
        slot.written = FutureTicket(future, copied)
        return slot.written

    def read(self, slot: Slot, dst: torch.Tensor) -> Ticket:
        slot.written.result()
        place: _Place = slot.place
        target = dst if dst.device.type == "cpu" else torch.empty(slot.nbytes, dtype=torch.uint8, device="cpu")
        _read(place, target)
        if target is not dst:
            dst.copy_(target)
        return DONE

    def free(self, slot: Slot) -> None:
        if isinstance(slot.written, FutureTicket):  # a range is not used again while its writer is at work
            slot.written.future.cancel()
            slot.written.future.add_done_callback(lambda _: self._back.put(slot))
        else:
            self._back.put(slot)

    def close(self) -> None:
        with self._lock:
            self._back.drain_locked()
            file, self._file = self._file, None
        if file is not None:
            file.close()

    def _free_stage(self, stage: Slot) -> None:
        assert self._staging is not None
        self._staging.free(stage)

    def _receive(self, slot: Slot) -> None:
        place: _Place = slot.place
        # The file may be another one after a fork or closed; its ranges are then nobody's any more.
        if place.file is self._file:
            place.file.extents.give(place.start, place.size)


class _Place:
    """Where in which file, and the checksum of what was written there."""

    __slots__ = ("crc", "file", "size", "start")

    def __init__(self, file: _File, start: int, size: int) -> None:
        self.file = file
        self.start = start
        self.size = size
        self.crc = 0


def _write(place: _Place, src: torch.Tensor) -> None:
    view = memoryview(src.numpy())
    place.crc = zlib.crc32(view)
    done = 0
    try:
        while done < len(view):
            done += os.pwrite(place.file.fd, view[done:], place.start + done)
    except OSError as error:
        raise TransferError(
            f"writing {format_nbytes(len(view))} to the disk tier failed after {done} bytes: {error}", errno=error.errno
        ) from error


def _write_staged(place: _Place, buffer: torch.Tensor, copied: Ticket) -> None:
    copied.result()
    _write(place, buffer)


def _read(place: _Place, dst: torch.Tensor) -> None:
    view = memoryview(dst.numpy())
    done = 0
    try:
        while done < len(view):
            got = os.preadv(place.file.fd, [view[done:]], place.start + done)
            if got == 0:
                raise PayloadError(
                    f"the disk tier's file ends after {done} of {len(view)} bytes: it was truncated from outside",
                    expected=len(view),
                    found=done,
                )
            done += got
    except OSError as error:
        raise TransferError(
            f"reading {format_nbytes(len(view))} from the disk tier failed after {done} bytes: {error}",
            errno=error.errno,
        ) from error
    if zlib.crc32(view) != place.crc:
        raise PayloadError(
            f"{len(view)} bytes came back from disk with another checksum than they were written with; "
            "the disk or its driver is not to be trusted: use disk_path= on another one",
            nbytes=len(view),
        )


def _create(folder: Path) -> _File:
    try:
        return _File(folder)
    except OSError as error:
        raise ConfigError(
            f"disk_path={str(folder)!r} cannot hold the disk tier: {error.strerror}; "
            "give disk_path= an existing folder that you may write",
            folder=str(folder),
        ) from error


def _open_nameless(folder: Path) -> int:
    """A file of mode 0600 that no path leads to."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    fd, path = tempfile.mkstemp(prefix="actstore-", dir=folder)
    os.unlink(path)
    return fd


def _warn_if_memory(folder: Path) -> None:
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return
    where = os.path.realpath(folder)
    kinds = {}
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        if where == point or where.startswith(point.rstrip("/") + "/"):
            kinds[point] = kind
    if kinds and kinds[max(kinds, key=len)] in ("tmpfs", "ramfs"):
        warnings.warn(
            f"the disk tier's folder {str(folder)!r} lies in memory (tmpfs): what goes there still fills RAM. "
            "Give disk_path= a folder on a real disk.",
            RuntimeWarning,
            stacklevel=4,
        )


