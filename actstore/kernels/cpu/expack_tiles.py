"""Tiles of expack on the CPU: measuring, writing, reading. The bytes: csrc/expack.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from actstore.kernels.cpu.expack_bits import bytes_of, field, halves_of, load_exponents, parts_of, units_of, upper_half
from actstore.kernels.cpu.expack_windows import measure_exponents, within_stack
from actstore.kernels.cpu.language import (
    BF16,
    F16,
    F32,
    get,
    inline,
    kernel,
    put,
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
from actstore.kernels.expack import BASE_AT, ESCAPES_AT, ESCAPES_BITS, OFFSET_BITS, WIDTH_AT, WIDTH_BITS, ZERO_AT
from actstore.kernels.planes import HEADER_NBYTES, PLANE_NBYTES, TILE

u8 = np.uint8


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
