"""zmask, topk and nm on the CPU, in tiles of 1024 elements under a mask. The bytes: csrc/sparse.md."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from actstore.errors import PayloadError
from actstore.kernels.base import Inner, Kernels, payload_pointer
from actstore.kernels.cpu.language import Parallel, get, inline, kernel, put, stack_of, u32, u32_at, u64_at
from actstore.kernels.cpu.masks import (
    COMPRESSES,
    LANES,
    WIDTHS,
    above,
    at_least,
    compress,
    differ,
    elements,
    equal,
    expand,
    largest,
    popcount,
)
from actstore.kernels.sparse import HEADER_NBYTES, TILE, Rule, SparseSections, check_header

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
    """Store the number of kept elements of a tile, where `scan` later writes its start, and the zeros after it."""
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
        kept = np.int64(get(u64_at(payload), 1))
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
            if rank == kept:
                for i in range(start, end):
                    put(elements(target, itemsize), i, width(0))
            else:
                for i in range(start, end):
                    top = np.int32(u32(get(masks, i // LANES) << u32(LANES - 1 - i % LANES)))
                    spread = np.int32(top >> np.int32(31))  # 0 or -1: from a bit LLVM would make a slower branch
                    value = get(elements(values, itemsize), min(rank, kept - 1))
                    put(elements(target, itemsize), i, width(value & width(spread)))
                    rank -= np.int64(spread)

    return expand_tiles


_magnitude_stack: Any = stack_of(4 * TILE)
_word_stack: Any = stack_of(4 * LANES)


@inline
def _store_mask(payload: Any, word: Any, numel: Any, mask: Any) -> Any:
    """Store a word of masks without the bits after the last element, and count the set bits."""
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
        magnitudes = _magnitude_stack()
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


Run = Callable[[int, int, int, int, int, int], None]


@cache
def kernels(dtype: torch.dtype, device: torch.device, rule: Rule, inner: Inner) -> Kernels:
    """Return the kernels for one dtype and rule, around those of the inner codec; compiled at first use."""
    itemsize = dtype.itemsize
    mark, compact, expand = _mark(itemsize, rule.row if rule else 0), _compact(itemsize), _expand(itemsize)
    lossy = None if inner.name == "raw" else inner.kernels("cpu", dtype, device)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> int:
        payload, source, head, tiles = (
            payload_pointer(out),
            src.data_ptr(),
            SparseSections.of(numel).inner,
            -(-numel // TILE),
        )
        keep, last = (rule.of(rule.row), rule.kept(numel % TILE)) if rule else (0, 0)
        mark(source, payload, numel, keep, last, tiles)
        scan(0, payload, numel, 0, 0, 0, tiles)
        header = _header(payload)
        count, used = header[1], 0
        if lossy is None:
            compact(source, payload + head, numel, 0, payload, tiles)
            used = count * itemsize
        elif count:
            values = torch.empty(count, dtype=dtype)
            compact(source, values.data_ptr(), numel, 0, payload, tiles)
            used = lossy.encode(values, out[head:], count, key)
            if used is None:
                used = inner._nbytes(count, itemsize)
        header[0] = head + used
        return head + used

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload, head, tiles = payload_pointer(buf), SparseSections.of(numel).inner, -(-numel // TILE)
        if buf.numel() < head:
            raise PayloadError(
                f"a sparse payload ends after {buf.numel()} bytes: must have {head} before its elements."
            )
        length, count = _header(payload)
        check_header(buf.numel(), (length, count), numel, itemsize, rule, inner)
        wrong = ctypes.c_int64(0)
        check(payload, ctypes.addressof(wrong), numel, 0, 0, 0, tiles)
        if wrong.value:
            raise PayloadError("a sparse payload was altered: its masks, starts and count contradict each other.")
        values = payload + head
        if lossy is not None and count:
            scratch = torch.empty(count, dtype=dtype)
            lossy.decode(buf[head:length], scratch, count, key)
            values = scratch.data_ptr()
        expand(values, out.data_ptr(), numel, 0, payload, tiles)

    return Kernels(encode, decode)


def _header(payload: int) -> ctypes.Array[ctypes.c_int64]:
    """View the header of a payload: its length and the number of its kept elements."""
    return (ctypes.c_int64 * 2).from_address(payload)


@cache
def _mark(itemsize: int, row: int) -> Run:
    if not row:
        return Parallel(compile_mark_nonzero(itemsize), TILE * itemsize)
    if row == TILE:
        return Parallel(compile_mark_tiles(itemsize), TILE * itemsize)
    return Parallel(compile_mark_groups(itemsize, row), TILE * itemsize)


@cache
def _compact(itemsize: int) -> Run:
    return Parallel(compile_compact(itemsize), TILE * itemsize)


@cache
def _expand(itemsize: int) -> Run:
    return Parallel(compile_expand(itemsize), TILE * itemsize)
