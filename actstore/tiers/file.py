"""A file that has no name, and so is gone with the process, however it ends."""

from __future__ import annotations

import errno
import os
import tempfile
import warnings
import weakref
import zlib
from pathlib import Path

from actstore.errors import PayloadError, StateError, TransferError
from actstore.units import format_nbytes


class NamelessFile:
    """Bytes in a file of mode 0600 that no path leads to. Thread-safe, `reserve` excepted.

    The descriptor stays open until the last reference to this object is gone, so that no late reader or writer can meet
    the number again on another file; `close` gives the bytes back at once.

    Attributes
    ----------
    pid : the process that may write here; a forked child shares the file, and only reads it
    closed : whether the bytes are gone
    """

    def __init__(self, folder: Path) -> None:
        self._fd = _open_nameless(folder)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._nbytes = 0  # promised by the file system
        self.pid = os.getpid()
        self.closed = False

    def reserve(self, nbytes: int) -> bool:
        """Have the file system promise that the file can hold `nbytes`; False when it cannot.

        Raises
        ------
        TransferError : the file system failed in another way
        """
        if nbytes <= self._nbytes:
            return True
        try:
            os.posix_fallocate(self._fd, self._nbytes, nbytes - self._nbytes)
        except OSError as error:
            os.ftruncate(self._fd, self._nbytes)  # a part may have been promised
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return False
            raise TransferError(
                f"reserving {format_nbytes(nbytes)} on disk failed: {error}", errno=error.errno
            ) from error
        self._nbytes = nbytes
        return True

    def shrink(self, nbytes: int) -> None:
        """Give back what lies beyond `nbytes`."""
        if nbytes < self._nbytes:
            os.ftruncate(self._fd, nbytes)
            self._nbytes = nbytes

    def write(self, view: memoryview, start: int) -> int:
        """Write all of `view` and return its CRC-32.

        Raises
        ------
        TransferError : the file system refused
        """
        crc = zlib.crc32(view)
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], start + done)
        except OSError as error:
            raise TransferError(
                f"writing {format_nbytes(len(view))} to the disk tier failed after {done} bytes: {error}",
                errno=error.errno,
            ) from error
        return crc

    def read(self, view: memoryview, start: int, crc: int) -> None:
        """Fill all of `view`.

        Raises
        ------
        TransferError : the file system refused
        PayloadError : the bytes are not those whose CRC-32 is `crc`
        StateError : the file was closed
        """
        done = 0
        try:
            while done < len(view):
                count = os.preadv(self._fd, [view[done:]], start + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise TransferError(
                f"reading {format_nbytes(len(view))} from the disk tier failed after {done} bytes: {error}",
                errno=error.errno,
            ) from error
        if self.closed:
            raise StateError("the disk tier was closed, and its bytes are gone")
        if done < len(view):
            raise PayloadError(
                f"the disk tier's file ends after {done} of {len(view)} bytes: it was truncated from outside",
                expected=len(view),
                found=done,
            )
        if zlib.crc32(view) != crc:
            raise PayloadError(
                f"{len(view)} bytes came back from disk with another checksum than they were written with; "
                + self._suspect(),
                nbytes=len(view),
            )

    def close(self) -> None:
        """Give the bytes back; the parent's stay as they are when a forked child closes."""
        self.closed = True
        if self.pid == os.getpid():
            os.ftruncate(self._fd, 0)

    def _suspect(self) -> str:
        if self.pid != os.getpid():
            return "the parent of this forked process has used their place again: run backward in the parent"
        return "the disk or its driver is not to be trusted: use disk_path= on another one"


def warn_if_memory(folder: Path) -> None:
    """Warn when what is written in `folder` still fills memory."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return
    where = os.path.realpath(folder)
    kinds = {}
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if where == point or where.startswith(point.rstrip("/") + "/"):
            kinds[point] = kind
    if kinds and kinds[max(kinds, key=len)] in ("tmpfs", "ramfs"):
        warnings.warn(
            f"the disk tier's folder {str(folder)!r} lies in memory (tmpfs): what goes there still fills RAM. "
            "Give disk_path= a folder on a real disk.",
            RuntimeWarning,
            stacklevel=3,
        )


def _open_nameless(folder: Path) -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    fd, path = tempfile.mkstemp(prefix="actstore-", dir=folder)
    os.unlink(path)
    return fd
