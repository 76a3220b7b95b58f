"""expack on the CPU. The bytes, and the rule by which the window of a tile is chosen: csrc/expack.md."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch

from actstore.kernels.base import Kernels, payload_pointer
from actstore.kernels.cpu.language import (
    BF16,
    F16,
    F32,
    KINDS,
    Parallel,
    get,
    inline,
    kernel,
    put,
    stack_of,
    u8_at,
    u16,
    u16_at,
    u32,
    u32_at,
    u64_at,
)
from actstore.kernels.cpu.planes import (
    VECTOR_NBYTES,
    at_least,
    equal_to,
    lowest,
    popcount,
    read_planes,
    tile_stack,
    u64,
    write_planes,
)
from actstore.kernels.expack import (
    BASE_AT,
    ESCAPES_AT,
    ESCAPES_BITS,
    OFFSET_BITS,
    WIDTH_AT,
    WIDTH_BITS,
    WINDOW_DEPTH,
    ZERO_AT,
    altered,
    check,
)
from actstore.kernels.planes import HEADER_NBYTES, PLANE_NBYTES, TILE

u8 = np.uint8
within_stack: Any = stack_of(2 * 2 * (WINDOW_DEPTH + 1))


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
    """Store the exponents of a tile, as bytes; 0 after the last element."""
    for i in range(count):
        upper = upper_half(source, start + i, kind)
        if kind == F16:
            put(u8_at(exponents), i, u8(u16(upper >> u16(10)) & u16(31)))
        else:
            put(u8_at(exponents), i, u8(upper >> u16(7)))
    for i in range(count, TILE):
        put(u8_at(exponents), i, u8(0))


@inline
def _count_from(exponents: Any, least: Any) -> Any:
    """Count the exponents of a tile that are at least `least`, which is not 0."""
    found = 0
    for step in range(TILE // VECTOR_NBYTES):
        found += popcount(at_least(exponents + step * VECTOR_NBYTES, u8(least)))
    return found


@inline
def _best_window(within: Any, zeros: Any, top: Any, count: Any, widest: Any, most: Any) -> Any:
    """Find the cheapest window of less than `most` bytes: ``bytes << 16 | zero << 15 | width << 8 | k``.

    It ends `k` below the top; `within[d]` of the exponents are less than `d` below the top.
    """
    best = most << 16
    for zero in range(2 if zeros > 0 else 1):
        for width in range(1, widest + 1):
            size = (1 << width) - 1 - zero
            cost = width * PLANE_NBYTES
            last = min(WINDOW_DEPTH - size, top - size) if zero else WINDOW_DEPTH - size
            if cost << 16 >= best or last < 0:
                break
            fullest = u16(0)  # of the windows that end k below: elements << 5 | 31 - k
            for k in range(WINDOW_DEPTH + 1):
                inside = u16(get(u16_at(within), k + size) - get(u16_at(within), k))
                found = u16(u16(inside << u16(5)) | u16(u16(WINDOW_DEPTH) - u16(k)))
                fullest = max(fullest, found if k <= last else u16(0))
            cost += count - np.int64(fullest >> u16(5)) - zeros * zero
            best = min(best, cost << 16 | zero << 15 | width << 8 | WINDOW_DEPTH - np.int64(fullest & u16(31)))
    return best


@inline
def measure_exponents(exponents: Any, count: Any, within: Any, kind: Any) -> Any:
    """Return the descriptor of a tile, without its offset."""
    largest = u8(0)
    for i in range(TILE):
        largest = max(largest, get(u8_at(exponents), i))
    top = np.int64(largest)
    zeros = count - _count_from(exponents, 1)
    found, depth = 0, 0
    while depth < WINDOW_DEPTH and found < count:
        found = _count_from(exponents, top - depth) if depth < top else count
        depth += 1
        put(u16_at(within), depth, u16(found))
    if depth == 1:
        return u64(top) << u64(BASE_AT)
    for d in range(depth + 1, 2 * WINDOW_DEPTH + 1):
        put(u16_at(within), d, u16(found))
    raw = 5 if kind == F16 else 8
    best = _best_window(within, zeros, top, count, min(5, raw - 1), raw * PLANE_NBYTES)
    cost = best >> 16
    if cost == raw * PLANE_NBYTES:
        return u64(raw) << u64(WIDTH_AT)
    zero, width, k = best >> 15 & 1, best >> 8 & 127, best & 255
    return (
        u64((top - k - (1 << width) + 2) & 255) << u64(BASE_AT)
        | u64(width) << u64(WIDTH_AT)
        | u64(zero) << u64(ZERO_AT)
        | u64(cost - width * PLANE_NBYTES) << u64(ESCAPES_AT)
    )


@inline
def _measure_tile(source: Any, exponents: Any, halves: Any, low: Any, start: Any, count: Any, kind: Any) -> None:
    load_exponents(source, exponents, start, count, kind)
    for i in range(start, start + count):
        upper = upper_half(source, i, kind)
        if kind == F16:
            put(u8_at(low), i, u8(upper))
        else:
            put(u8_at(low), i, u8(u16(u16(upper & u16(0x7F)) | u16(u16(upper >> u16(8)) & u16(0x80)))))
    if kind == F32:
        for i in range(start, start + count):
            put(u16_at(halves), i, u16(get(u32_at(source), i)))


def compile_measure(kind: int) -> Any:
    """Compile the kernel that writes the bytes, halves and descriptors, the latter without offsets."""

    @kernel
    def measure(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        exponents, within = tile_stack(), within_stack()
        put(u16_at(within), 0, u16(0))
        halves, low = halves_of(payload, numel), bytes_of(payload, numel, kind)
        for tile in range(first, last):
            start, count = tile * TILE, min(TILE, numel - tile * TILE)
            _measure_tile(source, exponents, halves, low, start, count, kind)
            put(u64_at(payload + HEADER_NBYTES), tile, measure_exponents(exponents, count, within, kind))

    return measure


def compile_scan(kind: int) -> Any:
    """Compile the kernel that gives the variable parts their offsets, and writes header and padding."""

    @kernel
    def scan(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        descriptors = u64_at(payload + HEADER_NBYTES)
        halves, low, tiles = halves_of(payload, numel), bytes_of(payload, numel, kind), parts_of(payload, numel, kind)
        offset = 0
        for tile in range(first, last):
            descriptor = get(descriptors, tile)
            put(descriptors, tile, descriptor | u64(offset))
            offset += units_of(descriptor, kind)
        put(u64_at(payload), 0, tiles - payload + 16 * offset)
        put(u64_at(payload), 1, numel)
        for i in range(payload + HEADER_NBYTES + 8 * last, halves):
            put(u8_at(i), 0, u8(0))
        if kind == F32:
            for i in range(halves + 2 * numel, low):
                put(u8_at(i), 0, u8(0))
        for i in range(low + numel, tiles):
            put(u8_at(i), 0, u8(0))

    return scan


@inline
def _encode_codes(exponents: Any, codes: Any, count: Any, base: Any, zero: Any) -> None:
    """Store the distance of each exponent to the base, modulo 256."""
    if zero:
        for i in range(TILE):
            exponent = get(u8_at(exponents), i)
            code = u8(255) if exponent == base else u8(exponent - base)
            put(u8_at(codes), i, u8(0) if exponent == u8(0) else code)
    else:
        for i in range(TILE):
            put(u8_at(codes), i, u8(get(u8_at(exponents), i) - base))
    for i in range(count, TILE):
        put(u8_at(codes), i, u8(0))


@inline
def _write_escapes(exponents: Any, codes: Any, escapes: Any, escape: Any) -> None:
    """Write the exponents that are in no window to `escapes`, with zeros up to a multiple of 16 bytes."""
    count = 0
    for start in range(0, TILE, VECTOR_NBYTES):
        mask = at_least(codes + start, escape)
        while mask != u64(0):
            put(u8_at(escapes), count, get(u8_at(exponents), start + lowest(mask)))
            mask &= mask - u64(1)
            count += 1
    for i in range(count, (count + 15) & -16):
        put(u8_at(escapes), i, u8(0))
    for i in range(TILE):
        put(u8_at(codes), i, min(get(u8_at(codes), i), escape))


@inline
def _write_tile(
    source: Any, part: Any, exponents: Any, codes: Any, start: Any, count: Any, descriptor: Any, kind: Any
) -> None:
    if kind == F16:
        for i in range(count):
            upper = get(u16_at(source), start + i)
            put(u8_at(codes), i, u8(u16(u16(upper >> u16(8)) & u16(3)) | u16(u16(upper >> u16(13)) & u16(4))))
        for i in range(count, TILE):
            put(u8_at(codes), i, u8(0))
        write_planes(codes, part, 3)
        part += 3 * PLANE_NBYTES
    load_exponents(source, exponents, start, count, kind)
    width, zero = field(descriptor, WIDTH_AT, WIDTH_BITS), field(descriptor, ZERO_AT, 1)
    _encode_codes(exponents, codes, count, u8(descriptor >> u64(BASE_AT)), zero)
    if field(descriptor, ESCAPES_AT, ESCAPES_BITS) > 0:
        _write_escapes(exponents, codes, part + width * PLANE_NBYTES, u8((1 << width) - 1))
    write_planes(codes, part, width)


def compile_write(kind: int) -> Any:
    """Compile the kernel that writes the variable part of each tile."""

    @kernel
    def write(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        exponents, codes = tile_stack(), tile_stack()
        tiles = parts_of(payload, numel, kind)
        for tile in range(first, last):
            start, count = tile * TILE, min(TILE, numel - tile * TILE)
            descriptor = get(u64_at(payload + HEADER_NBYTES), tile)
            part = tiles + 16 * field(descriptor, 0, OFFSET_BITS)
            _write_tile(source, part, exponents, codes, start, count, descriptor, kind)

    return write


@inline
def _read_exponents(part: Any, exponents: Any, codes: Any, descriptor: Any, raw: Any) -> Any:
    """Read the exponents of a tile. Return False where its number of escapes is not that of its descriptor."""
    width, zero = field(descriptor, WIDTH_AT, WIDTH_BITS), field(descriptor, ZERO_AT, 1)
    base, most = u8(descriptor >> u64(BASE_AT)), field(descriptor, ESCAPES_AT, ESCAPES_BITS)
    if width == 0:
        for i in range(TILE):
            put(u8_at(exponents), i, u8(0) if zero else base)
        return most == 0
    read_planes(part, codes, width)
    for i in range(TILE):
        code = get(u8_at(codes), i)
        put(u8_at(exponents), i, u8(0) if zero and code == u8(0) else u8(code + base))
    if width == raw:
        return most == 0
    escape, escapes = u8((1 << width) - 1), part + width * PLANE_NBYTES
    count = 0
    for start in range(0, TILE, VECTOR_NBYTES):
        mask = equal_to(codes + start, escape)
        if count + popcount(mask) > most:
            return False
        while mask != u64(0):
            put(u8_at(exponents), start + lowest(mask), get(u8_at(escapes), count))
            mask &= mask - u64(1)
            count += 1
    return count == most


@inline
def _read_tile(
    part: Any,
    halves: Any,
    low: Any,
    target: Any,
    exponents: Any,
    codes: Any,
    start: Any,
    count: Any,
    descriptor: Any,
    kind: Any,
) -> Any:
    if kind == F16:
        right = _read_exponents(part + 3 * PLANE_NBYTES, exponents, codes, descriptor, 5)
        read_planes(part, codes, 3)
    else:
        right = _read_exponents(part, exponents, codes, descriptor, 8)
    for i in range(count):
        exponent, mantissa = u16(get(u8_at(exponents), i)), u16(get(u8_at(low), start + i))
        if kind == F16:
            rest = u16(get(u8_at(codes), i))
            upper = u16(u16(u16(exponent & u16(31)) << u16(10)) | mantissa)
            upper = u16(upper | u16(u16(u16(rest & u16(3)) << u16(8)) | u16(u16(rest & u16(4)) << u16(13))))
            put(u16_at(target), start + i, upper)
        else:
            upper = u16(
                u16(exponent << u16(7)) | u16(u16(mantissa & u16(0x7F)) | u16(u16(mantissa & u16(0x80)) << u16(8)))
            )
            if kind == BF16:
                put(u16_at(target), start + i, upper)
            else:
                put(u32_at(target), start + i, u32(u32(u32(upper) << u32(16)) | u32(get(u16_at(halves), start + i))))
    return right


def compile_read(kind: int) -> Any:
    """Compile the kernel that reads all tiles.

    `extra` is the length of the payload. The kernel sets the number at the address `wrong` to 1 for an invalid payload.
    """
    raw = 5 if kind == F16 else 8

    @kernel
    def read(payload: int, target: int, numel: int, wrong: int, length: int, first: int, last: int) -> None:
        exponents, codes = tile_stack(), tile_stack()
        halves, low, tiles = halves_of(payload, numel), bytes_of(payload, numel, kind), parts_of(payload, numel, kind)
        right = True
        for tile in range(first, last):
            start, count = tile * TILE, min(TILE, numel - tile * TILE)
            descriptor = get(u64_at(payload + HEADER_NBYTES), tile)
            part = tiles + 16 * field(descriptor, 0, OFFSET_BITS)
            if (
                field(descriptor, WIDTH_AT, WIDTH_BITS) > raw
                or part + 16 * units_of(descriptor, kind) > payload + length
            ):
                right = False
            else:
                right &= _read_tile(part, halves, low, target, exponents, codes, start, count, descriptor, kind)
        if not right:
            put(u64_at(wrong), 0, 1)

    return read


@cache
def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for one dtype; compiled at first use, then read from numba's disk cache."""
    kind, itemsize = KINDS[dtype], dtype.itemsize
    measure, write, read = (
        Parallel(compile_for(kind), TILE * itemsize) for compile_for in (compile_measure, compile_write, compile_read)
    )
    scan = compile_scan(kind)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> int:
        payload, source, tiles = payload_pointer(out), src.data_ptr(), -(-numel // TILE)
        measure(source, payload, numel, 0, 0, tiles)
        scan(0, payload, numel, 0, 0, 0, tiles)
        write(source, payload, numel, 0, 0, tiles)
        return (ctypes.c_int64 * 2).from_address(payload)[0]

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload = payload_pointer(buf)
        length = check(buf, numel, itemsize)
        wrong = ctypes.c_int64(0)
        read(payload, out.data_ptr(), numel, ctypes.addressof(wrong), length, -(-numel // TILE))
        if wrong.value:
            raise altered()

    return Kernels(encode, decode)
