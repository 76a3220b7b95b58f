"""hadamard128, written for clarity, one group at a time; csrc/hadamard128.md in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from actstore.codecs import Codec, Hadamard128, Int4, Int8
from tests.oracles import find, philox, rows
from tests.oracles.int8 import LARGEST, from_float32, to_float32

VARIANTS = (
    Hadamard128(Int4()),
    Hadamard128(Int8(64, round="stochastic")),
)

Floats = npt.NDArray[np.float32]

SMALLEST = np.float32(2.0**-96)
FACTOR = np.float32(2.0**-3.5)


def transform(group: Floats, signs: Floats | np.float32) -> Floats:
    """128 float32, times signs, the Hadamard matrix and 2**-3.5; all NaN where one is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.where(np.abs(group) < SMALLEST, np.float32(0), group) * (FACTOR * signs)
        for apart in (64, 32, 16, 8, 4, 2, 1):
            for low in range(128):
                high = low + apart
                if not low & apart:
                    values[low], values[high] = values[low] + values[high], values[low] - values[high]
    return values if np.isfinite(values).all() else np.full(128, np.nan, np.float32)


def encode(data: bytes, dtype: str, inner: Codec, key: int = 0, sizes: tuple[int, ...] = ()) -> bytes:
    values, exponents = to_float32(data, dtype), b""
    if width := row_of(sizes):
        values, found = normalised(values.reshape(-1, width))
        exponents = found.astype(np.int8).tobytes()
    padded = np.append(values, np.zeros(-len(values) % 128, np.float32)).reshape(-1, 128)
    rotated = [transform(group, philox.signs(key)) for group in padded]
    payload = find.encode(inner, b"".join(group.tobytes() for group in rotated), "float32", key)
    return payload + bytes(-len(payload) % 16) + exponents if width else payload


def decode(payload: bytes, numel: int, dtype: str, inner: Codec, key: int = 0, sizes: tuple[int, ...] = ()) -> bytes:
    width = row_of(sizes)
    if width:
        exponents = np.frombuffer(payload, np.int8)[-numel // width :].astype(np.int32)
    rotated = np.frombuffer(find.decode(inner, payload, -(-numel // 128) * 128, "float32", key), np.float32)
    groups = [transform(group, np.float32(1)) * philox.signs(key) for group in rotated.reshape(-1, 128)]
    values = np.concatenate([np.zeros(0, np.float32), *groups])[:numel]
    if width:
        with np.errstate(over="ignore", under="ignore"):
            values = np.ldexp(values, np.repeat(exponents, width)).astype(np.float32)
        values = np.where(np.abs(values) < 2.0**-126, np.float32(0), values)
    return from_float32(np.clip(values, -LARGEST[dtype], LARGEST[dtype]), dtype)


def row_of(sizes: tuple[int, ...]) -> int:
    """The elements of a row, 0 where 128 divide them or there is one only."""
    _, width = rows.fit(sizes, 1)
    return width if width % 128 else 0


def normalised(values: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Rows with a largest magnitude from 1 to below 2, where that is possible, and the exponents that do it."""
    values = np.where(np.abs(values) < SMALLEST, np.float32(0), values)
    tops = [np.abs(row[np.isfinite(row)]).max(initial=0) for row in values]
    exponents = np.array([min(max(int(np.frexp(top)[1]) - 1, -96), 126) if top else -96 for top in tops])
    with np.errstate(over="ignore"):
        return np.ldexp(values, -exponents[:, None]).astype(np.float32).ravel(), exponents
