"""e5m6, written for clarity; csrc/e5m6.md in NumPy."""

from __future__ import annotations

import numpy as np

from actstore.codecs import E5m6
from tests.oracles.int8 import from_float32, to_float32

VARIANTS = (E5m6(), E5m6("keep"))

# the values of the codes 0 to 0x7bf, in rising order, then what Inf stands for in rounding
VALUES = np.array(
    [f * 2.0**-20 if e == 0 else (64 + f) * 2.0 ** (e - 21) for e in range(32) for f in range(64)][:0x7C1]
)


def encode(data: bytes, dtype: str, signs: str = "auto") -> bytes:
    values = to_float32(data, dtype)
    missing = np.isnan(values)
    magnitudes = np.minimum(np.abs(np.where(missing, 0, values)).astype(np.float64), VALUES[-1])
    above = np.clip(np.searchsorted(VALUES, magnitudes), 1, len(VALUES) - 1)
    up, down = VALUES[above] - magnitudes, magnitudes - VALUES[above - 1]
    nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    if signs == "keep":
        nearest = np.where(magnitudes > 0, np.maximum(nearest, 1), nearest)
    codes = np.where(missing, 0x7E0, nearest | np.signbit(values) << 11)
    high = (codes >> 4).astype(np.uint8).tobytes()
    low = np.append(codes & 15, [0] * (len(codes) % 2)).reshape(-1, 2)
    return high + bytes(-len(high) % 16) + (low[:, 0] + 16 * low[:, 1]).astype(np.uint8).tobytes()


def decode(payload: bytes, numel: int, dtype: str, signs: str = "auto") -> bytes:
    high = np.frombuffer(payload, np.uint8, numel).astype(np.uint16)
    both = np.frombuffer(payload, np.uint8, (numel + 1) // 2, offset=-(-numel // 16) * 16)
    low = np.stack([both & 15, both >> 4], 1).reshape(-1)[:numel]
    codes = high << 4 | low
    table = np.concatenate([VALUES[:-1], [np.inf], np.full(63, np.nan)]).astype(np.float32)
    magnitudes = table[codes & 0x7FF]
    return from_float32(np.where(codes >> 11, -magnitudes, magnitudes), dtype)
