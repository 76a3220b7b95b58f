"""int8, written for clarity, one group at a time; csrc/int8.md in NumPy.

Elements come and go as bytes in storage order; `dtype` is "float32", "float16" or "bfloat16".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from actstore.codecs import Int8
from tests.oracles import philox

VARIANTS = (
    *(Int8(group) for group in (32, 64, 128, 256, 512, 1024)),
    *(Int8(group, round=round) for group in (32, 128, 1024) for round in ("stochastic", "dither")),  # noqa: A001
    *(Int8(group, signs="keep") for group in (32, 128, 1024)),
    *(Int8(64, round=round, signs="keep") for round in ("stochastic", "dither")),  # noqa: A001
    Int8(signs="round"),
    Int8(axis="token"),
    *(Int8(32, round=round, axis="token", signs="keep") for round in ("nearest", "stochastic", "dither")),  # noqa: A001
    *(Int8(32, round=round, axis="token") for round in ("stochastic", "dither")),  # noqa: A001
    *(Int8(group, affine=True) for group in (32, 128, 1024)),
    *(Int8(64, affine=True, round=round) for round in ("stochastic", "dither")),  # noqa: A001
    *(Int8(64, affine=True, round=round, signs="keep") for round in ("nearest", "stochastic", "dither")),  # noqa: A001
)

Floats = npt.NDArray[np.float32]

SMALLEST = np.float32(2.0**-110)
LARGEST = {
    "float32": np.finfo(np.float32).max,
    "float16": np.float32(65504),
    "bfloat16": np.uint32(0x7F7F0000).view(np.float32),
}


def to_float32(data: bytes, dtype: str) -> Floats:
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"float32": "<f4", "float16": "<f2"}[dtype]).astype(np.float32)


def from_float32(values: Floats, dtype: str) -> bytes:
    """Round to nearest even; every NaN becomes the positive quiet one."""
    values = np.where(np.isnan(values), np.float32(np.nan), values)
    if dtype == "bfloat16":
        bits = values.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
    return values.astype({"float32": "<f4", "float16": "<f2"}[dtype]).tobytes()


def scale_of(values: Floats) -> Floats:
    """The float32 value, exactly a bfloat16, that one group is divided by; zero where the group is too small."""
    largest = largest_of(values)
    if largest < SMALLEST:
        return np.float32(0)
    exact = np.float32(largest) / np.float32(127)
    return ((exact.view(np.uint32).astype(np.uint64) + 0xFFFF) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def largest_of(values: Floats) -> np.float32:
    """The largest finite magnitude."""
    finite = values[np.isfinite(values)]
    return np.abs(finite).max() if finite.size else np.float32(0)


def encode_group(values: Floats, noise: Floats, keep: bool) -> tuple[npt.NDArray[np.int8], Floats]:
    scale = scale_of(values)
    finite = np.isfinite(values)
    codes = np.full(values.shape, -128, np.int8)
    reciprocal = np.float32(1) / scale if scale else np.float32(0)
    steps = values[finite] * reciprocal + noise[finite]
    codes[finite] = np.clip(np.rint(steps), -127, 127).astype(np.int8)
    if keep:
        codes = np.where(codes == 0, np.sign(np.where(finite, values, 0)), codes).astype(np.int8)
        if not scale and largest_of(values):
            scale = np.float32(2.0**-117)
    return codes, scale


def groups(numel: int, group: int, columns: int) -> list[npt.NDArray[np.int64]]:
    """The elements of each group, in the order of the scales: those of `group` rows of `columns` in one column."""
    blocks = [np.arange(start, numel)[: group * columns] for start in range(0, numel, group * columns)]
    return [block[column::columns] for block in blocks for column in range(columns)]


def encode(
    data: bytes,
    dtype: str,
    group: int = 128,
    round: str = "nearest",  # noqa: A002
    axis: str = "element",
    key: int = 0,
    columns: int = 1,
    affine: bool = False,
    signs: str = "auto",
) -> bytes:
    if affine:
        return _affine().encode(data, dtype, 8, group, round, key, signs)
    values = to_float32(data, dtype)
    noise = np.zeros(len(values), np.float32) if round == "nearest" else philox.offsets(0, len(values), key)
    codes, scales = np.zeros(len(values), np.int8), b""
    for members in groups(len(values), group, columns):
        codes[members], scale = encode_group(values[members], noise[members], signs == "keep")
        scales += (scale.view(np.uint32) >> 16).astype("<u2").tobytes()
    return codes.tobytes() + bytes(-len(codes) % 16) + scales


def decode(
    payload: bytes,
    numel: int,
    dtype: str,
    group: int = 128,
    round: str = "nearest",  # noqa: A002
    axis: str = "element",
    key: int = 0,
    columns: int = 1,
    affine: bool = False,
    signs: str = "auto",
) -> bytes:
    if affine:
        return _affine().decode(payload, numel, dtype, 8, group, round, key, signs)
    codes = np.frombuffer(payload, np.int8, numel)
    places = groups(numel, group, columns)
    bits = np.frombuffer(payload, "<u2", len(places), offset=-(-numel // 16) * 16).astype(np.uint32) << 16
    scales = np.zeros(numel, np.float32)
    for members, scale in zip(places, bits.view(np.float32), strict=True):
        scales[members] = scale
    steps = codes.astype(np.float32)
    if round == "dither":
        steps = steps - np.where((codes == 0) & (signs == "keep"), 0, philox.offsets(0, numel, key))
    with np.errstate(over="ignore"):
        values = steps * scales
    values = np.clip(values, -LARGEST[dtype], LARGEST[dtype])
    return from_float32(np.where(codes == -128, np.float32(np.nan), values), dtype)


def _affine():
    from tests.oracles import affine  # which needs this module

    return affine
