"""Sections, descriptors and parts of an element, for the kernels of expack on the CPU. See csrc/expack.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from actstore.kernels.cpu.language import F16, F32, get, inline, put, u8_at, u16, u16_at, u32, u32_at
from actstore.kernels.cpu.planes import u64
from actstore.kernels.expack import ESCAPES_AT, ESCAPES_BITS, WIDTH_AT, WIDTH_BITS
from actstore.kernels.planes import HEADER_NBYTES, PLANE_NBYTES, TILE

u8 = np.uint8


@inline
def field(descriptor: Any, at: Any, width: Any) -> Any:
    return np.int64(descriptor >> u64(at)) & ((1 << width) - 1)


@inline
def units_of(descriptor: Any, kind: Any) -> Any:
    """Return the length of the variable part of a tile, in units of 16 bytes."""
    planes = field(descriptor, WIDTH_AT, WIDTH_BITS) + (3 if kind == F16 else 0)
    return planes * (PLANE_NBYTES // 16) + (field(descriptor, ESCAPES_AT, ESCAPES_BITS) + 15) // 16


@inline
def halves_of(payload: Any, numel: Any) -> Any:
    return payload + HEADER_NBYTES + (((numel + TILE - 1) // TILE * 8 + 15) & -16)


@inline
def bytes_of(payload: Any, numel: Any, kind: Any) -> Any:
    return halves_of(payload, numel) + (((2 * numel + 15) & -16) if kind == F32 else 0)


@inline
def parts_of(payload: Any, numel: Any, kind: Any) -> Any:
    return bytes_of(payload, numel, kind) + ((numel + 15) & -16)


@inline
def upper_half(source: Any, index: Any, kind: Any) -> Any:
    """Return the upper 16 bits of an element: all of a 16-bit one."""
    if kind == F32:
        return u16(get(u32_at(source), index) >> u32(16))
    return get(u16_at(source), index)


@inline
def load_exponents(source: Any, exponents: Any, start: Any, count: Any, kind: Any) -> None:
    """Store the exponents of a tile, as bytes; 0 behind the last element."""
    for i in range(count):
        upper = upper_half(source, start + i, kind)
        if kind == F16:
            put(u8_at(exponents), i, u8(u16(upper >> u16(10)) & u16(31)))
        else:
            put(u8_at(exponents), i, u8(upper >> u16(7)))
    for i in range(count, TILE):
        put(u8_at(exponents), i, u8(0))
