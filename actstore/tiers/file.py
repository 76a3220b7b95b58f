"""A file that has no name, and so is gone with the process, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from actstore.base.units import format_nbytes
from actstore.errors import PayloadError, StateError, TransferError

digest: Callable[[memoryview], int]
try:
    import xxhash

    digest = xxhash.xxh3_64_intdigest
except ImportError:  # the extra `disk` is not installed: slower, and as good for bytes that no other process reads
    digest = zlib.crc32

BLOCK_NBYTES = 4096  # the alignment that O_DIRECT needs of lengths, offsets and addresses, on every disk in use
GROWTH_NBYTES = 64 * 2**20, 2**30  # least and most reserved at once: each reservation waits for the writes under way


class NamelessFile:
    """Bytes in a file of mode 0600 that no path leads to. Thread-safe, `reserve` and `shrink` excepted.

    The descriptor stays open until the last reference to this object is gone: no late read or write can then reach
    another file under the same number. `close` gives the bytes back at once.

    Attributes
    ----------
    pid : the process that may write here; a forked child shares the file, and only reads it
    closed : whether the bytes are gone
    direct : whether bytes bypass the system's page cache. Then offsets, lengths and addresses are multiples of
        `BLOCK_NBYTES`. It becomes False for good once the file system refuses
    """

    def __init__(self, folder: Path) -> None:
        self._fd = _open_nameless(folder)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._nbytes = 0  # promised by the file system
        self.pid = os.getpid()
        self.closed = False
        self.direct = hasattr(os, "O_DIRECT") and self._set_direct(True)

    @property
    def path(self) -> str:
        """Path at which this process can open the file once more, while the file is open."""
        return f"/proc/self/fd/{self._fd}"

    def reserve(self, nbytes: int) -> bool:
        """Reserve `nbytes` of the file system for the file, and some more where possible; False where it is full.

        Raises
        ------
        TransferError : the file system failed in another way
        """
        if nbytes <= self._nbytes:
            return True
        least, most = GROWTH_NBYTES
        ample = self._nbytes + min(most, max(least, self._nbytes // 4))
        return (ample > nbytes and self._promise(ample)) or self._promise(nbytes)

    def shrink(self, nbytes: int) -> None:
        """Give back the bytes beyond `nbytes`."""
        if nbytes < self._nbytes:
            os.ftruncate(self._fd, nbytes)
            self._nbytes = nbytes

    def write(self, views: Sequence[memoryview], start: int) -> None:
        """Write all of `views`, one after the other, from the byte `start` on.

        Raises
        ------
        TransferError : the file system refused
        """
        nbytes = sum(map(len, views))
        done, error = self._move(os.pwritev, views, start)
        if done < nbytes:
            raise TransferError(
                f"writing {format_nbytes(nbytes)} to the disk tier failed after {done} bytes: "
                f"{error or 'it takes no more'}. Give Disk(path) a folder on another disk, or send less to disk.",
                errno=error.errno if error else errno.EIO,
            ) from error

    def read(self, views: Sequence[memoryview], start: int, nbytes: int) -> None:
        """Fill `views`, one after the other, from the byte `start` on; of all their bytes the first `nbytes` matter.

        Raises
        ------
        TransferError : the file system refused
        PayloadError : the file is too short
        StateError : the file was closed
        """
        done, error = self._move(os.preadv, views, start)
        self.check_open()
        if error is not None:
            raise TransferError(
                f"reading {format_nbytes(nbytes)} from the disk tier failed after {done} bytes: {error}. "
                "Give Disk(path) a folder on another disk.",
                errno=error.errno,
            ) from error
        self.check_end(done, nbytes)

    def check_open(self) -> None:
        """Raise StateError if the file was closed."""
        if self.closed:
            raise StateError(
                "the disk tier was closed, and its bytes are gone. Close the store after the last backward."
            )

    def check_end(self, done: int, nbytes: int) -> None:
        """Raise PayloadError if a read of `nbytes` ended after `done` because the file does."""
        if done < nbytes:
            raise PayloadError(
                f"the disk tier's file ends after {done} of {nbytes} bytes: it was truncated from outside. "
                "Give Disk(path) a folder that nothing else cleans.",
                expected=nbytes,
                found=done,
            )

    def verify(self, view: memoryview, expected: int) -> None:
        """Compare the checksum of bytes that were read with the checksum at their write.

        Raises
        ------
        PayloadError : they differ
        """
        self.compare(digest(view), expected, len(view))

    def compare(self, found: int, expected: int, nbytes: int) -> None:
        """Compare checksums as `verify` does, where the caller has computed the one of the bytes read."""
        if found != expected:
            raise PayloadError(
                f"{nbytes} bytes came back from disk with another checksum than they were written with; "
                + self._suspect(),
                nbytes=nbytes,
            )

    def close(self) -> None:
        """Give the bytes back; a forked child leaves those of its parent."""
        self.closed = True
        if self.pid == os.getpid():
            os.ftruncate(self._fd, 0)

    def _promise(self, nbytes: int) -> bool:
        try:
            os.posix_fallocate(self._fd, self._nbytes, nbytes - self._nbytes)
        except OSError as error:
            os.ftruncate(self._fd, self._nbytes)  # a part may have been promised
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return False
            raise TransferError(
                f"reserving {format_nbytes(nbytes)} on disk failed: {error}. Give Disk(path) a folder on another disk.",
                errno=error.errno,
            ) from error
        self._nbytes = nbytes
        return True

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], views: Sequence[memoryview], start: int
    ) -> tuple[int, OSError | None]:
        """Repeat a system call until all bytes are done, the file ends or an error comes. Return the bytes done, and
        the error."""
        left, done = list(views), 0
        may_refuse = True
        while left:
            try:
                count = call(self._fd, left, start + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not may_refuse:
                    return done, error
                # The file system refuses O_DIRECT, or the rest after a short write is not a multiple of a block.
                # Another thread may have cleared `direct` already, so it does not tell whether to try once more.
                may_refuse = False
                self.direct = self._set_direct(False)
                continue
            if count == 0:
                break
            done += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
        return done, None

    def _set_direct(self, wanted: bool) -> bool:
        """Switch O_DIRECT on or off. Return whether it is on now."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return wanted

    def _suspect(self) -> str:
        if self.pid != os.getpid():
            return "the parent of this forked process has used their place again: run backward in the parent"
        return "the disk or its driver returns wrong bytes: use Disk(path) on another disk"


def file_system(folder: Path) -> str:
    """Return the kind of the file system that holds a folder, such as ext4; empty where the system does not tell."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return ""
    where = os.path.realpath(folder)
    kinds = {}
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if where == point or where.startswith(point.rstrip("/") + "/"):
            kinds[point] = kind
    return kinds[max(kinds, key=len)] if kinds else ""


def is_memory(kind: str) -> bool:
    """Return whether a file system of this kind keeps its files in memory."""
    return kind in ("tmpfs", "ramfs")


def warn_if_memory(folder: Path) -> None:
    """Warn when files in `folder` fill memory."""
    if is_memory(file_system(folder)):
        warnings.warn(
            f"the disk tier's folder {str(folder)!r} lies in memory (tmpfs): what goes there still fills RAM. "
            "Give Disk(path) a folder on a real disk.",
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
