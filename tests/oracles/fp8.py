"""fp8, written for clarity, one group at a time; csrc/fp8.md in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from actstore.codecs import Fp8
from tests.oracles import philox
from tests.oracles.int8 import LARGEST, Floats, from_float32, to_float32

VARIANTS = (
    Fp8(),
    Fp8(32, round="stochastic"),
    Fp8(64, "pow2"),
    Fp8(256),
    Fp8(512),
    Fp8(1024, "pow2", "stochastic"),
    Fp8(signs="keep"),
    Fp8(64, "pow2", "stochastic", "keep"),
    Fp8(32, round="stochastic", signs="keep"),
    Fp8(256, "pow2", signs="keep"),
)

SMALLEST = np.float32(2.0**-98)

# the values of the codes 0x00 to 0x7e, in rising order
VALUES = np.array([f * 2.0**-9 if e == 0 else (8 + f) * 2.0 ** (e - 10) for e in range(16) for f in range(8)][:-1])


def scale_of(values: Floats, scale: str) -> Floats:
    """The float32 value, exactly a bfloat16, that one group is divided by; zero where the group is too small."""
    finite = values[np.isfinite(values)]
    largest = np.abs(finite).max() if finite.size else np.float32(0)
    if largest < SMALLEST:
        return np.float32(0)
    exact = np.float32(largest) / np.float32(448)
    below = 0xFFFF if scale == "linear" else 0x7FFFFF
    return ((exact.view(np.uint32).astype(np.uint64) + below) & ~np.uint64(below)).astype(np.uint32).view(np.float32)


def encode_group(
    values: Floats, scale: Floats, uniform: npt.NDArray[np.uint8] | None, keep: bool
) -> npt.NDArray[np.uint8]:
    finite = np.isfinite(values)
    reciprocal = np.float32(1) / scale if scale else np.float32(0)
    scaled = np.abs(np.where(finite, values, np.float32(0)) * reciprocal).astype(np.float64)
    _, exponent = np.frexp(scaled)  # scaled = a number of [1/2, 1) * 2^exponent
    step = 2.0 ** (np.maximum(exponent - 1, -6) - 3)
    if uniform is None:
        multiple = np.rint(scaled / step)
    else:
        multiple = (np.rint(scaled / step * 65536) + 256 * uniform.astype(np.float64) + 128) // 65536
    rounded = np.minimum(multiple * step, 448)
    codes = np.searchsorted(VALUES, rounded)
    assert (VALUES[codes] == rounded).all()
    if keep:
        codes = np.where((codes == 0) & (values != 0), 1, codes)
    return np.where(finite, codes | np.signbit(values) << 7, 0x7F).astype(np.uint8)


def encode(
    data: bytes,
    dtype: str,
    group: int = 128,
    scale: str = "linear",
    round: str = "nearest",  # noqa: A002
    key: int = 0,
    signs: str = "auto",
) -> bytes:
    values = to_float32(data, dtype)
    uniform = None if round == "nearest" else ((philox.offsets(0, len(values), key) + 0.5) * 256).astype(np.uint8)
    codes, scales = b"", b""
    for start in range(0, len(values), group):
        here = slice(start, start + group)
        found = scale_of(values[here], scale)
        codes += encode_group(
            values[here], found, None if uniform is None else uniform[here], signs == "keep"
        ).tobytes()
        finite = values[here][np.isfinite(values[here])]
        if signs == "keep" and not found and finite.any():
            found = np.float32(2.0**-107)
        scales += (found.view(np.uint32) >> 16).astype("<u2").tobytes()
    return codes + bytes(-len(codes) % 16) + scales


def decode(
    payload: bytes,
    numel: int,
    dtype: str,
    group: int = 128,
    scale: str = "linear",
    round: str = "nearest",  # noqa: A002
    key: int = 0,
    signs: str = "auto",
) -> bytes:
    codes = np.frombuffer(payload, np.uint8, numel)
    bits = np.frombuffer(payload, "<u2", -(-numel // group), offset=-(-numel // 16) * 16).astype(np.uint32) << 16
    scales = np.repeat(bits.view(np.float32), group)[:numel]
    magnitudes = np.append(VALUES, np.nan)[codes & 0x7F].astype(np.float32)
    with np.errstate(over="ignore"):
        values = np.where(codes & 0x80, -magnitudes, magnitudes) * scales
    return from_float32(np.clip(values, -LARGEST[dtype], LARGEST[dtype]), dtype)
