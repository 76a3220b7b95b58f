"""Masks of the largest magnitudes on the CPU: of tiles of 1024 elements, of groups of 4 to 32. See csrc/sparse.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from actstore.kernels.cpu.language import get, inline, kernel, put, stack_of, u32, u32_at
from actstore.kernels.cpu.masks import LANES, WIDTHS, above, at_least, elements, equal, largest, popcount
from actstore.kernels.cpu.tiles import TILE_WORDS, end_tile, masks_of
from actstore.kernels.sparse import TILE

_tile_stack: Any = stack_of(4 * TILE)
_word_stack: Any = stack_of(4 * LANES)


@inline
def _store_mask(payload: Any, word: Any, numel: Any, mask: Any) -> Any:
    """Store a word of masks without the bits behind the last element, and count the set bits."""
    if numel - word * LANES < LANES:
        mask = u32(mask & u32(u32(u32(1) << u32(numel - word * LANES)) - u32(1)))
    put(u32_at(masks_of(payload)), word, mask)
    return popcount(mask)


def compile_mark_tiles(itemsize: int) -> Any:
    """Compile the kernel that marks tiles; `key` is the number to keep of a tile, `extra` that of a short last one."""
    width = WIDTHS[itemsize]
    unsigned = width((1 << (8 * itemsize - 1)) - 1)
    step = LANES * itemsize

    @kernel
    def mark(source: int, payload: int, numel: int, keep: int, keep_last: int, first: int, last: int) -> None:
        magnitudes = _tile_stack()
        for tile in range(first, last):
            size = min(TILE, numel - tile * TILE)
            for i in range(size):
                magnitude = width(get(elements(source, itemsize), tile * TILE + i) & unsigned)
                put(elements(magnitudes, itemsize), i, magnitude)
            for i in range(size, TILE):
                put(elements(magnitudes, itemsize), i, 0)
            missing = keep_last if size < TILE else keep
            threshold = np.uint64(0)  # the largest that enough magnitudes reach, bit by bit
            for bit in range(8 * itemsize - 1):
                candidate = np.uint64(threshold | np.uint64(np.uint64(1 << (8 * itemsize - 2)) >> np.uint64(bit)))
                count = 0
                for word in range(TILE_WORDS):
                    count += popcount(at_least(magnitudes + step * word, candidate, itemsize))
                threshold = candidate if count >= missing else threshold
            for word in range(TILE_WORDS):
                missing -= popcount(above(magnitudes + step * word, threshold, itemsize))
            count = 0
            for word in range((size + LANES - 1) // LANES):
                mask = above(magnitudes + step * word, threshold, itemsize)
                ties = equal(magnitudes + step * word, threshold, itemsize)
                if popcount(ties) <= missing:
                    missing -= popcount(ties)
                    mask = u32(mask | ties)
                else:
                    for _ in range(missing):
                        lowest = u32(ties & u32(u32(0) - ties))
                        mask, ties = u32(mask | lowest), u32(ties ^ lowest)
                    missing = 0
                count += _store_mask(payload, tile * TILE_WORDS + word, numel, mask)
            end_tile(payload, numel, tile, count)

    return mark


def compile_mark_groups(itemsize: int, group: int) -> Any:
    """Compile the kernel that marks groups; `key` is the number to keep of each `group` elements."""

    @kernel
    def mark(source: int, payload: int, numel: int, keep: int, extra: int, first: int, last: int) -> None:
        for tile in range(first, last):
            count = 0
            full = min(TILE_WORDS * (tile + 1), numel // LANES)
            for word in range(TILE_WORDS * tile, full):
                mask = largest(source + LANES * itemsize * word, np.uint64(keep), group, itemsize)
                put(u32_at(masks_of(payload)), word, mask)
                count += popcount(mask)
            if (tile + 1) * TILE > numel and numel % LANES:
                word_at = _word_stack()
                for i in range(LANES):
                    put(elements(word_at, itemsize), i, 0)
                for i in range(numel % LANES):
                    put(elements(word_at, itemsize), i, get(elements(source, itemsize), full * LANES + i))
                count += _store_mask(payload, full, numel, largest(word_at, np.uint64(keep), group, itemsize))
            end_tile(payload, numel, tile, count)

    return mark
