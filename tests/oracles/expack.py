"""expack, written for clarity, one tile at a time; csrc/expack.md in NumPy.

Elements come and go as bytes in storage order; `dtype` is "float32", "float16" or "bfloat16".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from actstore.codecs import Expack
from tests.oracles.planes import PLANE_NBYTES, TILE, pack, round_up, unpack
from tests.oracles.samples import ITEMSIZE

VARIANTS = (Expack(),)

Numbers = npt.NDArray[np.uint64]

EXPONENT = {"float32": (23, 8), "float16": (10, 5), "bfloat16": (7, 8)}  # its lowest bit and how many bits
OFFSET, BASE, WIDTH, ZERO, ESCAPES = 0, 40, 48, 52, 53


class Window(NamedTuple):
    """How the exponents of a tile are written; least first."""

    nbytes: int  # of planes and escapes, without padding
    zero: int = 0
    width: int = 0
    below: int = 0  # where the window ends, below the largest exponent
    base: int = 0


def windows(exponents: Numbers, most: int) -> list[Window]:
    """All windows that `encode` chooses from."""
    exponents = exponents.astype(np.int64)
    top, numel = int(exponents.max()), len(exponents)
    if (exponents == top).all():
        return [Window(0, base=top)]
    found = [Window(PLANE_NBYTES * most, width=most)]
    for zero in (0, 1):
        for width in range(1, min(5, most - 1) + 1):
            size = 2**width - 1 - zero
            for below in range(31 - size + 1):
                first, last = top - below - size + 1, top - below
                covered = (first <= exponents) & (exponents <= last)
                if zero:
                    covered |= exponents == 0
                if zero and (first <= 0 or not (exponents == 0).any()):
                    continue
                cost = PLANE_NBYTES * width + numel - int(covered.sum())
                found.append(Window(cost, zero, width, below, (first - zero) % 256))
    return found


def encode_exponents(exponents: Numbers, bits: int) -> tuple[int, bytes]:
    """A descriptor without its offset, and planes and escapes."""
    best = min(windows(exponents, bits))
    escape = 2**best.width - 1
    codes, escapes = [], b""
    for exponent in exponents.tolist():
        code = (exponent - best.base) % 256
        if best.zero and exponent == 0:
            code = 0
        elif 0 < best.width < bits and (code >= escape or (best.zero and code == 0)):
            code = escape
            escapes += bytes([exponent])
        codes.append(code)
    descriptor = best.base << BASE | best.width << WIDTH | best.zero << ZERO | len(escapes) << ESCAPES
    assert best.nbytes == PLANE_NBYTES * best.width + len(escapes)
    return descriptor, pack(np.array(codes, np.uint64), best.width) + round_up(escapes)


def decode_exponents(descriptor: int, part: bytes, numel: int, bits: int) -> Numbers:
    base, width, zero = descriptor >> BASE & 255, descriptor >> WIDTH & 15, descriptor >> ZERO & 1
    escapes = iter(part[width * PLANE_NBYTES :])
    exponents = []
    for code in unpack(part, width)[:numel].tolist():
        if 0 < width < bits and code == 2**width - 1:
            exponents.append(next(escapes))
        else:
            exponents.append(0 if zero and code == 0 else (base + code) % 256)
    return np.array(exponents, np.uint64) % 2**bits


def encode(data: bytes, dtype: str) -> bytes:
    elements = np.frombuffer(data, f"<u{ITEMSIZE[dtype]}").astype(np.uint64)
    numel = len(elements)
    if not numel:
        return b""
    lowest, bits = EXPONENT[dtype]
    exponents = elements >> lowest & (2**bits - 1)
    sign = elements >> (lowest + bits)
    mantissa = elements & (2**lowest - 1)

    halves = b""
    if dtype == "float32":
        halves = round_up((mantissa & 0xFFFF).astype("<u2").tobytes())
        mantissa = mantissa >> 16
    if dtype == "float16":
        low_bytes = mantissa & 0xFF
        rest = mantissa >> 8 | sign << 2
    else:
        low_bytes = mantissa | sign << 7

    descriptors, parts = b"", b""
    for start in range(0, numel, TILE):
        tile = slice(start, start + TILE)
        descriptor, part = encode_exponents(exponents[tile], bits)
        descriptors += (descriptor | len(parts) // 16 << OFFSET).to_bytes(8, "little")
        parts += pack(rest[tile], 3) + part if dtype == "float16" else part
    body = round_up(descriptors) + halves + round_up(low_bytes.astype(np.uint8).tobytes()) + parts
    return (16 + len(body)).to_bytes(8, "little") + numel.to_bytes(8, "little") + body


def decode(payload: bytes, numel: int, dtype: str) -> bytes:
    if not numel:
        return b""
    lowest, bits = EXPONENT[dtype]
    tiles = -(-numel // TILE)
    descriptors = np.frombuffer(payload, "<u8", tiles, 16)
    halves_at = 16 + len(round_up(bytes(8 * tiles)))
    bytes_at = halves_at + (len(round_up(bytes(2 * numel))) if dtype == "float32" else 0)
    parts_at = bytes_at + len(round_up(bytes(numel)))
    low_bytes = np.frombuffer(payload, np.uint8, numel, bytes_at).astype(np.uint64)

    elements = np.zeros(numel, np.uint64)
    for index, descriptor in enumerate(descriptors.tolist()):
        tile = slice(index * TILE, min((index + 1) * TILE, numel))
        part = payload[parts_at + 16 * (descriptor & (2**40 - 1)) :]
        if dtype == "float16":
            rest = unpack(part, 3)[: tile.stop - tile.start]
            elements[tile] = (rest & 3) << 8 | rest >> 2 << 15 | low_bytes[tile]
            part = part[3 * PLANE_NBYTES :]
        else:
            elements[tile] = (low_bytes[tile] & 127) << (lowest - 7) | low_bytes[tile] >> 7 << (lowest + 8)
        elements[tile] |= decode_exponents(descriptor, part, tile.stop - tile.start, bits) << lowest
    if dtype == "float32":
        elements |= np.frombuffer(payload, "<u2", numel, halves_at).astype(np.uint64)
    return elements.astype(f"<u{ITEMSIZE[dtype]}").tobytes()
