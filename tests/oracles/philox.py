"""Philox4x32-10, one block at a time in Python's own integers; csrc/philox.md."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WORD = 0xFFFFFFFF


def words(block: int, purpose: int, key: int) -> list[int]:
    a, b, c, d = block & WORD, block >> 32, purpose, 0
    low, high = key & WORD, key >> 32
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = second >> 32 ^ b ^ low, second & WORD, first >> 32 ^ d ^ high, first & WORD
        low, high = low + 0x9E3779B9 & WORD, high + 0xBB67AE85 & WORD
    return [a, b, c, d]


def offsets(start: int, count: int, key: int) -> npt.NDArray[np.float32]:
    """The noise of elements `start` to `start + count`."""
    blocks = range(start // 16, (start + count + 15) // 16)
    drawn = b"".join(np.array(words(block, 0, key), "<u4").tobytes() for block in blocks)
    uniform = np.frombuffer(drawn, np.uint8)[start % 16 :][:count]
    return ((uniform + 0.5) / 256 - 0.5).astype(np.float32)


def signs(key: int) -> npt.NDArray[np.float32]:
    """128 times +1 or -1: a set bit is -1."""
    drawn = np.array(words(0, 1, key), "<u4").view(np.uint8)
    return np.where(np.unpackbits(drawn, bitorder="little"), -1, 1).astype(np.float32)
