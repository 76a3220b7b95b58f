"""nf4, written for clarity, one group at a time; csrc/nf4.md in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from actstore.codecs import Nf4
from tests.oracles.int8 import LARGEST, Floats, from_float32, to_float32

VARIANTS = (
    Nf4(),
    Nf4(64),
    Nf4(128),
    Nf4(256),
    Nf4(64, "bnb"),
    Nf4(signs="keep"),
    Nf4(64, "bnb", "keep"),
)

# the column "float32" of the page
VALUES = np.array(
    [
        *(0xBF800000, 0xBF3239B1, 0xBF066B30, 0xBECA32A0, 0xBE91A24D, 0xBE3D353F, 0xBDBA7871, 0x00000000),
        *(0x3DA2FAFF, 0x3E24CAE3, 0x3E7C04DD, 0x3EAD033A, 0x3EE1A4B8, 0x3F1007AB, 0x3F3913B3, 0x3F800000),
    ],
    np.uint32,
).view(np.float32)
BOUNDS = (VALUES[:-1] + VALUES[1:]) / np.float32(2)
SMALLEST = np.float32(2.0**-110)
BNB_LEAST = np.float32(1e-38)


def encode_group(values: Floats, layout: str, short: bool, keep: bool) -> tuple[npt.NDArray[np.uint8], bytes]:
    """Codes, and the absmax as it is stored."""
    if not np.isfinite(values).all():
        absmax = np.uint16(0x7FC0) if layout == "plain" else np.uint32(0x7FC00000)
        return np.full(len(values), 7, np.uint8), absmax.tobytes()
    largest = np.abs(values).max()
    if layout == "bnb":
        divisor = max(largest, BNB_LEAST)
        scaled = values / divisor if short else values * (np.float32(1) / divisor)
        return kept(count_below(scaled), values, keep), np.float32(divisor if short else largest).tobytes()
    if largest < SMALLEST:
        absmax = SMALLEST if keep and largest else np.float32(0)
        bits = np.uint16(int(absmax.view(np.uint32)) >> 16)
        return kept(np.full(len(values), 7, np.uint8), values, keep), bits.tobytes()
    bits = min((int(largest.view(np.uint32)) + 0xFFFF) >> 16, 0x7F7F)
    absmax = np.uint32(bits << 16).view(np.float32)
    return kept(count_below(values * (np.float32(4) / absmax) / np.float32(4)), values, keep), np.uint16(bits).tobytes()


def kept(codes: npt.NDArray[np.uint8], values: Floats, keep: bool) -> npt.NDArray[np.uint8]:
    """The codes, where signs are kept with 6 and 8 at the most and at the least on the two sides of zero."""
    if not keep:
        return codes
    codes = np.where(values < 0, np.minimum(codes, 6), codes)
    return np.where(values > 0, np.maximum(codes, 8), codes).astype(np.uint8)


def count_below(scaled: Floats) -> npt.NDArray[np.uint8]:
    return (scaled[:, None] > BOUNDS).sum(1).astype(np.uint8)


def encode(data: bytes, dtype: str, group: int = 32, layout: str = "plain", signs: str = "auto") -> bytes:
    values = to_float32(data, dtype)
    codes, absmaxes = [], b""
    for start in range(0, len(values), group):
        members = values[start : start + group]
        found, absmax = encode_group(members, layout, len(members) < group, signs == "keep")
        codes += found.tolist()
        absmaxes += absmax
    codes += [7] * (len(codes) % 2)
    low, high = (codes[::2], codes[1::2]) if layout == "plain" else (codes[1::2], codes[::2])
    packed = bytes(one + 16 * other for one, other in zip(low, high, strict=True))
    return packed + bytes(-len(packed) % 16) + absmaxes


def decode(
    payload: bytes, numel: int, dtype: str, group: int = 32, layout: str = "plain", signs: str = "auto"
) -> bytes:
    nbytes, groups = (numel + 1) // 2, -(-numel // group)
    start = -(-nbytes // 16) * 16
    if layout == "plain":
        absmaxes = (np.frombuffer(payload, "<u2", groups, start).astype(np.uint32) << 16).view(np.float32)
    else:
        absmaxes = np.frombuffer(payload, "<f4", groups, start)
    packed = np.frombuffer(payload, np.uint8, nbytes)
    pairs = [packed & 15, packed >> 4]
    codes = np.stack(pairs if layout == "plain" else pairs[::-1], 1).reshape(-1)[:numel]
    absmaxes = np.where(absmaxes < SMALLEST, np.float32(0), absmaxes)
    values = VALUES[codes] * np.repeat(absmaxes, group)[:numel]
    return from_float32(np.clip(values, -LARGEST[dtype], LARGEST[dtype]), dtype)
