"""intpack on the CPU. The bytes: csrc/intpack.md."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch

from actstore.kernels.base import Kernels, payload_pointer
from actstore.kernels.cpu.language import Parallel, get, inline, kernel, put, u8_at, u64_at
from actstore.kernels.cpu.masks import elements
from actstore.kernels.cpu.planes import read_planes, tile_stack, u64, write_planes
from actstore.kernels.intpack import DESCRIPTOR_NBYTES, OFFSET_AT, altered, check
from actstore.kernels.planes import HEADER_NBYTES, PLANE_NBYTES, TILE

u8 = np.uint8
# bytes of an element, its type, the type of its bits
KINDS: dict[torch.dtype, tuple[int, Any, Any]] = {
    torch.int8: (1, np.int8, np.uint8),
    torch.int16: (2, np.int16, np.uint16),
    torch.int32: (4, np.int32, np.uint32),
    torch.int64: (8, np.int64, np.uint64),
    torch.uint8: (1, np.uint8, np.uint8),
    torch.bool: (1, np.uint8, np.uint8),
}


@cache
def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for one dtype; compiled at first use, then read from numba's disk cache."""
    itemsize = dtype.itemsize
    measure, write, read = (
        Parallel(compile_for(*KINDS[dtype]), TILE * itemsize)
        for compile_for in (_compile_measure, _compile_write, _compile_read)
    )

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> int:
        payload, source, tiles = payload_pointer(out), src.data_ptr(), -(-numel // TILE)
        measure(source, payload, numel, 0, 0, tiles)
        _scan(0, payload, numel, 0, 0, 0, tiles)
        write(source, payload, numel, 0, 0, tiles)
        return ctypes.c_int64.from_address(payload).value

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload, length, wrong = payload_pointer(buf), check(buf, numel, itemsize), ctypes.c_int64(0)
        read(payload, out.data_ptr(), numel, ctypes.addressof(wrong), length, -(-numel // TILE))
        if wrong.value:
            raise altered()

    return Kernels(encode, decode)


@inline
def _base(payload: Any, tile: Any) -> Any:
    return get(u64_at(payload + HEADER_NBYTES), 2 * tile)


@inline
def _place(payload: Any, tile: Any) -> Any:
    """Return the word with offset and width of a tile."""
    return get(u64_at(payload + HEADER_NBYTES), 2 * tile + 1)


@inline
def _part(payload: Any, numel: Any, place: Any) -> Any:
    parts = payload + HEADER_NBYTES + DESCRIPTOR_NBYTES * ((numel + TILE - 1) // TILE)
    return parts + 16 * np.int64(place >> u64(OFFSET_AT))


@kernel
def _scan(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
    """Give the tiles their offsets, and write the header."""
    offset = u64(0)
    for tile in range(first, last):
        width = _place(payload, tile)
        put(u64_at(payload + HEADER_NBYTES), 2 * tile + 1, width | offset << u64(OFFSET_AT))
        offset += width * u64(PLANE_NBYTES // 16)
    put(u64_at(payload), 0, _part(payload, numel, offset << u64(OFFSET_AT)) - payload)
    put(u64_at(payload), 1, numel)


def _compile_measure(itemsize: int, number: Any, unsigned: Any) -> Any:
    """Compile the kernel that writes the descriptors without offsets."""

    @kernel
    def measure(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        for tile in range(first, last):
            least = most = number(get(elements(source, itemsize), tile * TILE))
            for i in range(tile * TILE, min((tile + 1) * TILE, numel)):
                value = number(get(elements(source, itemsize), i))
                least = min(least, value)
                most = max(most, value)
            span = u64(np.int64(most)) - u64(np.int64(least))
            width = 0
            while width < 64 and span >> u64(width) != u64(0):
                width += 1
            put(u64_at(payload + HEADER_NBYTES), 2 * tile, u64(np.int64(least)))
            put(u64_at(payload + HEADER_NBYTES), 2 * tile + 1, u64(width))

    return measure


def _compile_write(itemsize: int, number: Any, unsigned: Any) -> Any:
    """Compile the kernel that writes the planes of each tile."""

    @kernel
    def write(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        codes = tile_stack()
        for tile in range(first, last):
            start, count = tile * TILE, min(TILE, numel - tile * TILE)
            place, base = _place(payload, tile), unsigned(_base(payload, tile))
            width, part = np.int64(place & u64(255)), _part(payload, numel, place)
            for i in range(count, TILE):
                put(u8_at(codes), i, u8(0))
            for bit in range(0, width, 8):
                shift = unsigned(bit)
                for i in range(count):
                    put(u8_at(codes), i, u8(unsigned(get(elements(source, itemsize), start + i) - base) >> shift))
                write_planes(codes, part + bit * PLANE_NBYTES, min(8, width - bit))

    return write


def _compile_read(itemsize: int, number: Any, unsigned: Any) -> Any:
    """Compile the kernel that reads all tiles.

    `extra` is the length of the payload. The kernel sets the number at the address `wrong` to 1 for an invalid payload.
    """
    most = 8 * itemsize

    @kernel
    def read(payload: int, target: int, numel: int, wrong: int, length: int, first: int, last: int) -> None:
        codes = tile_stack()
        right = True
        for tile in range(first, last):
            start, count = tile * TILE, min(TILE, numel - tile * TILE)
            place, base = _place(payload, tile), unsigned(_base(payload, tile))
            width, part = np.int64(place & u64(255)), _part(payload, numel, place)
            if width > most or part + width * PLANE_NBYTES > payload + length:
                right = False
                continue
            for i in range(count):
                put(elements(target, itemsize), start + i, base)
            for bit in range(0, width, 8):
                read_planes(part + bit * PLANE_NBYTES, codes, min(8, width - bit))
                shift = unsigned(bit)
                for i in range(count):
                    more = unsigned(unsigned(get(u8_at(codes), i)) << shift)
                    put(
                        elements(target, itemsize),
                        start + i,
                        unsigned(get(elements(target, itemsize), start + i) + more),
                    )
        if not right:
            put(u64_at(wrong), 0, 1)

    return read
