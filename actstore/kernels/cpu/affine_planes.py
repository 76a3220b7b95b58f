"""Planes of the codes of affine blocks on the CPU: from a byte for each code, and back. The bytes: csrc/affine.md.

The sizes of planes, the last arguments of these functions, are constants of the kernel that calls them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from actstore.kernels.cpu.language import get, inline, put, u8_at, u16, u16_at, u32, u32_at, u64_at

PADDING_NUMEL = 128  # elements in 16 bytes of a plane of one bit: the codes are padded to a multiple of it

_u8, _u64 = np.uint8, np.uint64


@inline
def pack(codes: Any, packed: Any, count: Any, shift: Any, width: Any) -> None:
    """Pack `width` bits, from bit `shift` on, of bytes with one code each, side by side, the first ones lowest."""
    if width == 8:
        for i in range(count):
            put(u8_at(packed), i, get(u8_at(codes), i))
    elif width == 4:
        for i in range(count // 2):
            pair = u16(u16(get(u16_at(codes), i) >> u16(shift)) & u16(0x0F0F))
            put(u8_at(packed), i, _u8(u16(pair | u16(pair >> u16(4)))))
    elif width == 2:
        for i in range(count // 4):
            four = u32(u32(get(u32_at(codes), i) >> u32(shift)) & u32(0x03030303))
            folded = u32(four | u32(four >> u32(6)))
            put(u8_at(packed), i, _u8(u32(folded | u32(folded >> u32(12)))))
    else:
        for i in range(count // 8):
            eight = _u64(_u64(get(u64_at(codes), i) >> _u64(shift)) & _u64(0x0101010101010101))
            folded8 = _u64(eight | _u64(eight >> _u64(7)))
            folded8 = _u64(folded8 | _u64(folded8 >> _u64(14)))
            put(u8_at(packed), i, _u8(_u64(folded8 | _u64(folded8 >> _u64(28)))))


@inline
def unpack(packed: Any, codes: Any, count: Any, shift: Any, width: Any) -> None:
    """Unpack the bytes of `pack`: the first plane, with `shift` 0, sets the codes; the second is added to them."""
    if width == 8:
        for i in range(count):
            put(u8_at(codes), i, get(u8_at(packed), i))
    elif width == 4:
        for i in range(count // 2):
            pair = u16(get(u8_at(packed), i))
            put(u16_at(codes), i, u16(u16(pair | u16(pair << u16(4))) & u16(0x0F0F)))
    elif width == 2:
        for i in range(count // 4):
            four = u32(get(u8_at(packed), i))
            spread = u32(four | u32(four << u32(6)))
            spread = u32(u32(spread | u32(spread << u32(12))) & u32(0x03030303))
            before = get(u32_at(codes), i) if shift else u32(0)
            put(u32_at(codes), i, u32(before | u32(spread << u32(shift))))
    else:
        for i in range(count // 8):
            eight = _u64(get(u8_at(packed), i))
            spread8 = _u64(eight | _u64(eight << _u64(28)))
            spread8 = _u64(spread8 | _u64(spread8 << _u64(14)))
            spread8 = _u64(_u64(spread8 | _u64(spread8 << _u64(7))) & _u64(0x0101010101010101))
            put(u64_at(codes), i, _u64(get(u64_at(codes), i) | _u64(spread8 << _u64(shift))))


@inline
def section(count: Any) -> Any:
    """Return the bytes of a section of `count` bits, up to the next multiple of 16."""
    return ((count + 127) >> 7) << 4


@inline
def padded(count: Any, width: Any) -> Any:
    """Count the elements of a plane up to the end of its section."""
    return -(-count * width // 128) * 128 // width
