"""Tiles of 1024 elements under a mask, on the CPU: counting, compacting, expanding. The bytes: csrc/sparse.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from actstore.kernels.cpu.language import get, inline, kernel, put, stack_of, u32, u32_at, u64_at
from actstore.kernels.cpu.masks import COMPRESSES, LANES, WIDTHS, compress, differ, elements, expand, popcount
from actstore.kernels.sparse import HEADER_NBYTES, TILE

TILE_WORDS = TILE // LANES
_tile_stack: Any = stack_of(8 * (TILE + 1))


@inline
def masks_of(payload: Any) -> Any:
    return payload + HEADER_NBYTES


@inline
def starts_of(payload: Any, numel: Any) -> Any:
    return payload + HEADER_NBYTES + (((numel + 31) // 32 * 4 + 15) & -16)


@inline
def end_tile(payload: Any, numel: Any, tile: Any, count: Any) -> None:
    """Store the number of kept elements of a tile, where `scan` later writes its start, and the zeros behind."""
    starts = u64_at(starts_of(payload, numel))
    put(starts, tile, count)
    if (tile + 1) * TILE >= numel:
        if tile % 2 == 0:
            put(starts, tile + 1, 0)
        words = (numel + 31) // 32
        for word in range(words, (words + 3) & -4):
            put(u32_at(masks_of(payload)), word, 0)


@kernel
def scan(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
    """Turn the counts of all tiles into starts, and store their sum in the header."""
    starts = u64_at(starts_of(payload, numel))
    total = np.uint64(0)
    for tile in range(first, last):
        count = get(starts, tile)
        put(starts, tile, total)
        total += count
    put(u64_at(payload), 1, total)


@kernel
def check(payload: int, wrong: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
    """Set the number at the address `wrong` to 1 where starts, masks and count of all tiles contradict each other."""
    masks, starts = u32_at(masks_of(payload)), u64_at(starts_of(payload, numel))
    words = (numel + 31) // 32
    total = np.uint64(0)
    right = True
    for tile in range(first, last):
        right = right and get(starts, tile) == total
        for word in range(TILE_WORDS * tile, min(TILE_WORDS * (tile + 1), words)):
            total += np.uint64(popcount(get(masks, word)))
    right = right and total == get(u64_at(payload), 1)
    if numel % LANES:
        right = right and get(masks, words - 1) >> u32(numel % LANES) == 0
    if not right:
        put(u64_at(wrong), 0, 1)


def compile_mark_nonzero(itemsize: int) -> Any:
    zero = WIDTHS[itemsize](0)

    @kernel
    def mark(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        masks = u32_at(masks_of(payload))
        for tile in range(first, last):
            count = 0
            words = min(TILE_WORDS * (tile + 1), numel // LANES)
            for word in range(TILE_WORDS * tile, words):
                mask = differ(source + LANES * itemsize * word, np.uint64(0), itemsize)
                put(masks, word, mask)
                count += popcount(mask)
            if (tile + 1) * TILE > numel and numel % LANES:
                mask = u32(0)
                for i in range(numel % LANES):
                    mask = u32(mask | u32(u32(get(elements(source, itemsize), words * LANES + i) != zero) << u32(i)))
                put(masks, words, mask)
                count += popcount(mask)
            end_tile(payload, numel, tile, count)

    return mark


def compile_compact(itemsize: int, compresses: bool = COMPRESSES) -> Any:
    """Compile the kernel that writes kept elements side by side to the target; `extra` is the payload."""

    @kernel
    def compact_tiles(source: int, values: int, numel: int, key: int, payload: int, first: int, last: int) -> None:
        masks = u32_at(masks_of(payload))
        for tile in range(first, last):
            target = values + np.int64(get(u64_at(starts_of(payload, numel)), tile)) * itemsize
            start = tile * TILE
            end = min(start + TILE, numel)
            if compresses:
                for word in range(start // LANES, end // LANES):
                    mask = get(masks, word)
                    compress(source + word * LANES * itemsize, target, mask, itemsize)
                    target += popcount(mask) * itemsize
                start = max(start, end // LANES * LANES)
            kept = _tile_stack()
            count = 0
            for i in range(start, end):  # on the stack: the last write may be one too many, in another thread's range
                put(elements(kept, itemsize), count, get(elements(source, itemsize), i))
                count += int(u32(get(masks, i // LANES) >> u32(i % LANES)) & u32(1))
            for i in range(count):
                put(elements(target, itemsize), i, get(elements(kept, itemsize), i))

    return compact_tiles


def compile_expand(itemsize: int, expands: bool = COMPRESSES) -> Any:
    """Compile the kernel that expands the kept elements at the source to all elements of the payload `extra`."""
    width = WIDTHS[itemsize]

    @kernel
    def expand_tiles(values: int, target: int, numel: int, key: int, payload: int, first: int, last: int) -> None:
        masks = u32_at(masks_of(payload))
        behind = np.int64(get(u64_at(payload), 1))
        for tile in range(first, last):
            rank = np.int64(get(u64_at(starts_of(payload, numel)), tile))
            start = tile * TILE
            end = min(start + TILE, numel)
            if expands:
                for word in range(start // LANES, end // LANES):
                    mask = get(masks, word)
                    expand(values + rank * itemsize, target + word * LANES * itemsize, mask, itemsize)
                    rank += popcount(mask)
                start = max(start, end // LANES * LANES)
            if rank == behind:
                for i in range(start, end):
                    put(elements(target, itemsize), i, width(0))
            else:
                for i in range(start, end):
                    top = np.int32(u32(get(masks, i // LANES) << u32(LANES - 1 - i % LANES)))
                    spread = np.int32(top >> np.int32(31))  # 0 or -1: from a bit LLVM would make a slower branch
                    value = get(elements(values, itemsize), min(rank, behind - 1))
                    put(elements(target, itemsize), i, width(value & width(spread)))
                    rank -= np.int64(spread)

    return expand_tiles
