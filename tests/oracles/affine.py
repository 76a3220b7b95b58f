"""Affine blocks, written for clarity, one group at a time; csrc/affine.md in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.oracles import philox
from tests.oracles.int8 import LARGEST, Floats, from_float32, to_float32

LEVELS = {bits: 254 if bits == 8 else (1 << bits) - 1 for bits in (8, 6, 5, 4, 3, 2)}
PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}  # bits of each, those of the low ones first
QUARTER = np.float32(0.25)
SMALLEST = np.float32(2.0**-82)


def up(value: np.float32) -> np.float32:
    """The least bfloat16 number that is not below a finite float32 one; the largest stays finite."""
    bits = value.view(np.uint32) & 0xFFFF0000
    cut = bits.view(np.float32)  # towards zero
    if cut >= value:
        return cut
    return (bits + np.uint32(0x10000)).view(np.float32)


def down(value: np.float32) -> np.float32:
    """The largest bfloat16 number that is not above `value`, or the lowest finite one; zero for tiny values."""
    if abs(value) < 2.0**-110:
        return np.float32(0)
    below = -up(-value)
    return below if np.isfinite(below) else -LARGEST["bfloat16"]


def stored(value: np.float32) -> int:
    return int(value.view(np.uint32)) >> 16


def around_zero(low: np.float32, high: np.float32, levels: int, bits: int) -> tuple[np.float32, int]:
    """A quarter of the smallest step with which a power of two is the code of zero, and that code."""
    low = max(low, -LARGEST["bfloat16"])
    found = []
    for code in (1 << power for power in range(bits)):
        step = max(
            up(-low * QUARTER / np.float32(code)), up(max(high * QUARTER, np.float32(0)) / np.float32(levels - code))
        )
        step = max(step, SMALLEST)
        if step * np.float32(code) <= LARGEST["bfloat16"] * QUARTER:
            found.append((step, code))
    return min(found)


def encode_group(
    values: Floats, noise: Floats, bits: int, keep: bool = False
) -> tuple[npt.NDArray[np.uint8], int, int]:
    """Codes, and the bits of the scale and of the minimum."""
    codes = np.zeros(values.shape, np.uint8)
    finite = np.isfinite(values)
    if bits < 8 and not finite.all():
        return codes, 0, 0x7FC0
    low, high = (f(values[finite]) for f in (np.min, np.max)) if finite.any() else (np.float32(0), np.float32(0))
    minimum = down(low)
    spread = high * QUARTER - minimum * QUARTER
    zero, quarter = -1, np.float32(0) if spread < SMALLEST else up(spread / np.float32(LEVELS[bits]))
    if keep and low < 0:
        quarter, zero = around_zero(low, high, LEVELS[bits], bits)
        minimum = quarter * np.float32(-4 * zero)
    elif keep and minimum * QUARTER < max(quarter, np.float32(2.0**-140)):
        minimum, zero = np.float32(0), 0
        quarter = max(
            up(high * QUARTER / np.float32(LEVELS[bits])), SMALLEST if high * QUARTER < SMALLEST else np.float32(0)
        )
        quarter = quarter if high else np.float32(0)
    scale, reciprocal = quarter * np.float32(4), np.float32(1) / quarter if quarter else np.float32(0)
    steps = (values[finite] * QUARTER - minimum * QUARTER) * reciprocal + noise[finite]
    steps = np.rint(steps)
    if keep:
        steps = np.where(values[finite] > 0, np.maximum(steps, zero + 1), steps)
        steps = np.where(values[finite] < 0, np.minimum(steps, zero - 1), steps)
    codes[finite] = np.clip(steps, 0, LEVELS[bits])
    if bits == 8:
        codes[finite] -= 127
        codes[~finite] = 128
    return codes, stored(scale), stored(minimum)


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def encode(
    data: bytes,
    dtype: str,
    bits: int,
    group: int,
    round: str,  # noqa: A002
    key: int = 0,
    signs: str = "auto",
) -> bytes:
    values = to_float32(data, dtype)
    noise = np.zeros(len(values), np.float32) if round == "nearest" else philox.offsets(0, len(values), key)
    groups = [
        encode_group(values[start : start + group], noise[start : start + group], bits, signs == "keep")
        for start in range(0, len(values), group)
    ]
    codes = np.concatenate([np.zeros(0, np.uint8), *(codes for codes, _, _ in groups)])
    columns = np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little")
    planes = np.split(columns, np.cumsum(PLANES[bits])[:-1], axis=1)
    packed = b"".join(pad(np.packbits(plane.ravel(), bitorder="little").tobytes()) for plane in planes)
    scales = np.array([scale for _, scale, _ in groups], "<u2").tobytes()
    minima = np.array([minimum for _, _, minimum in groups], "<u2").tobytes()
    return packed + pad(scales) + minima


def decode(
    payload: bytes,
    numel: int,
    dtype: str,
    bits: int,
    group: int,
    round: str,  # noqa: A002
    key: int = 0,
    signs: str = "auto",
) -> bytes:
    groups, at, columns = -(-numel // group), 0, []
    for width in PLANES[bits]:
        packed = np.frombuffer(payload, np.uint8, -(-numel * width // 8), offset=at)
        columns.append(np.unpackbits(packed, count=numel * width, bitorder="little").reshape(numel, width))
        at += len(pad(packed.tobytes()))
    codes = np.packbits(np.concatenate(columns, axis=1), axis=1, bitorder="little").ravel()
    scales, minima = (
        np.repeat((words.astype(np.uint32) << 16).view(np.float32), group)[:numel] * QUARTER
        for words in (
            np.frombuffer(payload, "<u2", groups, offset=at),
            np.frombuffer(payload, "<u2", groups, offset=at + len(pad(bytes(2 * groups)))),
        )
    )
    steps = codes.astype(np.float32)
    if bits == 8:
        steps = codes.view(np.int8).astype(np.float32) + np.float32(127)
    if round == "dither":
        silent = (minima + steps * scales == 0) & (signs == "keep")
        steps = steps - np.where(silent, 0, philox.offsets(0, numel, key))
    with np.errstate(over="ignore"):
        values = np.clip((minima + steps * scales) * np.float32(4), -LARGEST[dtype], LARGEST[dtype])
    missing = np.isnan(minima) | ((codes == 128) if bits == 8 else False)
    return from_float32(np.where(missing, np.float32(np.nan), values), dtype)
