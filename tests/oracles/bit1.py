"""bit1, written for clarity; csrc/bit1.md in NumPy."""

from __future__ import annotations

import numpy as np

from actstore.codecs import Bit1

VARIANTS = (Bit1(),)


def encode(data: bytes, dtype: str) -> bytes:
    return np.packbits(np.frombuffer(data, np.uint8) != 0, bitorder="little").tobytes()


def decode(payload: bytes, numel: int, dtype: str) -> bytes:
    return np.unpackbits(np.frombuffer(payload, np.uint8), count=numel, bitorder="little").tobytes()
