"""Bytes through the compressors of blosc2, in frames. The bytes: csrc/blosc.md."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from actstore.errors import KernelUnavailable, PayloadError
from actstore.kernels.base import round_up

FRAME_NBYTES = 64 << 20  # bytes that are compressed at once; a chunk of blosc2 must be smaller than 2 GiB
HEADER_NBYTES = 16
FORMATS = {"lz4": 1, "zstd": 4}  # of a chunk, in its flags
FILTERS = {"none": 0, "byte": 1, "bit": 2}
_CHUNK_HEADER_NBYTES = 32
_PLAIN, _ZEROS = 0, 1  # kinds of chunks that `compress2` writes of bytes

Bytes = npt.NDArray[np.uint8]


class Compressor(NamedTuple):
    """The options of blosc2: ``lz4`` or ``zstd``, its level, its filter, and the width of an element for the filter."""

    name: str
    level: int
    shuffle: str
    itemsize: int


@cache
def library() -> Any:
    """Import the package blosc2.

    Raises
    ------
    KernelUnavailable : it is not installed
    """
    try:
        import blosc2
    except ImportError as error:
        raise KernelUnavailable(
            "blosc2 is not installed. Run pip install 'actstore[bytes]'.", package="blosc2"
        ) from error
    return blosc2


def bound(nbytes: int) -> int:
    """Return an upper bound of the bytes of a payload, for `nbytes` bytes of data."""
    return _frames_at(nbytes) + round_up(nbytes)


def compress(data: Bytes, payload: Bytes, how: Compressor) -> int:
    """Write the payload of `data`, and return the bytes used.

    Notes
    -----
    Uses one thread: several would write the blocks of a chunk in the order in which they finish, which varies.
    """
    blosc2 = library()
    options = {
        "codec": blosc2.Codec.LZ4 if how.name == "lz4" else blosc2.Codec.ZSTD,
        "clevel": how.level,
        "typesize": how.itemsize,
        "nthreads": 1,
        "filters": [blosc2.Filter(FILTERS[how.shuffle])],
        "filters_meta": [0],
    }
    at = _frames_at(len(data))
    sizes = payload[HEADER_NBYTES:at].view("<u8")
    sizes[:] = 0
    for index, (start, count) in enumerate(_frames(len(data))):
        frame = data[start : start + count]
        chunk = np.frombuffer(blosc2.compress2(frame, **options), np.uint8)
        stored = chunk if len(chunk) < count else frame
        sizes[index] = len(stored)
        end = at + round_up(len(stored))
        payload[at : at + len(stored)] = stored
        payload[at + len(stored) : end] = 0
        at = end
    payload[:HEADER_NBYTES].view("<u8")[:] = at, len(data)
    return at


def length(payload: Bytes) -> int:
    """Return the length of a payload from its first 8 bytes, or more, in `payload`.

    Raises
    ------
    PayloadError : the length is above that of `payload`, or too small
    """
    found = int(payload[:8].view("<u8")[0])
    if not HEADER_NBYTES <= found <= len(payload):
        raise PayloadError(f"a compressed payload says that it has {found} bytes, but {len(payload)} are given.")
    return found


def content_nbytes(payload: Bytes) -> int:
    """Return the number of bytes to which a payload decompresses."""
    return int(payload[8:HEADER_NBYTES].view("<u8")[0])


def decompress(payload: Bytes, data: Bytes, how: Compressor) -> None:
    """Fill `data` from a payload of `length` bytes that decompresses to as many bytes as `data` has.

    Raises
    ------
    PayloadError : the bytes are not such as `compress` writes
    """
    at = _frames_at(len(data))
    if at > len(payload):
        raise PayloadError(f"a compressed payload of {len(payload)} bytes ends within its table of frames.")
    sizes = payload[HEADER_NBYTES:at].view("<u8").tolist()
    ends = at + np.cumsum([0, *map(round_up, (min(size, FRAME_NBYTES) for size in sizes))])
    if ends[-1] != len(payload):
        raise PayloadError(f"a compressed payload has {len(payload)} bytes, but its frames end at {ends[-1]}.")
    for (start, count), size, first in zip(_frames(len(data)), sizes, ends.tolist(), strict=False):
        stored, frame = payload[first : first + size], data[start : start + count]
        if size == count:
            frame[:] = stored
        else:
            _expand(stored, frame, how)


def _expand(chunk: Bytes, frame: Bytes, how: Compressor) -> None:
    """Decompress one chunk, after a check that its header is one that `compress` makes blosc2 write."""
    nbytes, _, cbytes = chunk[4:16].view("<i4").tolist() if len(chunk) >= _CHUNK_HEADER_NBYTES else (-1, -1, -1)
    if (
        (nbytes, cbytes) != (len(frame), len(chunk))
        or chunk[2] >> 5 != FORMATS[how.name]
        or chunk[3] != how.itemsize
        or not {*chunk[16:22].tolist()} <= {0, FILTERS[how.shuffle]}
        or chunk[31] >> 4 & 7 not in (_PLAIN, _ZEROS)
    ):
        raise PayloadError(f"a frame of {len(chunk)} bytes does not hold {len(frame)} bytes as {how.name} writes them.")
    try:
        library().decompress2(chunk, dst=frame, nthreads=1)
    except (RuntimeError, ValueError) as error:
        raise PayloadError(f"a frame of {len(chunk)} bytes does not decompress: {error}") from error


def _frames(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, FRAME_NBYTES):
        yield start, min(FRAME_NBYTES, nbytes - start)


def _frames_at(nbytes: int) -> int:
    """Return the start of the frames, after the header and the table of sizes."""
    return HEADER_NBYTES + round_up(8 * -(-nbytes // FRAME_NBYTES))
