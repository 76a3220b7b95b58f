"""Bit planes of a tile of 1024 numbers, in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TILE = 1024
PLANE_NBYTES = TILE // 8


def pack(numbers: npt.NDArray[np.uint64], width: int) -> bytes:
    """Bit `b` of number `i`, of up to 1024, is bit ``i % 8`` of byte ``128 * b + i / 8``; the rest is 0."""
    padded = np.zeros(TILE, np.uint64)
    padded[: len(numbers)] = numbers
    bits = [padded >> np.uint64(b) & np.uint64(1) for b in range(width)]
    return b"".join(np.packbits(plane.astype(np.uint8), bitorder="little").tobytes() for plane in bits)


def unpack(planes: bytes, width: int) -> npt.NDArray[np.uint64]:
    numbers = np.zeros(TILE, np.uint64)
    for b in range(width):
        plane = np.frombuffer(planes, np.uint8, PLANE_NBYTES, b * PLANE_NBYTES)
        numbers |= np.unpackbits(plane, bitorder="little").astype(np.uint64) << np.uint64(b)
    return numbers


def round_up(data: bytes) -> bytes:
    """With zeros up to a multiple of 16 bytes."""
    return data + bytes(-len(data) % 16)
