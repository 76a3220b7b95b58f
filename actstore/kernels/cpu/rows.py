"""Groups that end with rows, on the CPU. The groups: csrc/rows.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from actstore.kernels.base import Bound, Kernels
from actstore.kernels.cpu.language import F32, Parallel, get, inline, put, stack_of, u8_at, u16_at, u32_at

TILE = 1024  # elements, a multiple of every group
elements_stack: Any = stack_of(4 * TILE)
codes_stack: Any = stack_of(TILE)


def in_rows(encode: Parallel, decode: Parallel, group: int, unit: int, extra: int = 0) -> Kernels:
    """Return the two directions of a codec whose groups end with rows; elements without rows are one row.

    A unit of work is `unit` elements of whole groups, a short group counted as a whole one. The `extra` of the kernels
    is the width of a row above 24 bits, with `extra` in these for `encode`.
    """

    def bind(numel: int) -> tuple[Bound, Bound]:
        units = -(-numel // unit)
        return encode.bind(numel, numel << 24 | extra, units), decode.bind(numel, numel << 24, units)

    def rows(numel: int, width: int) -> tuple[Bound, Bound]:
        groups = numel // width * -(-width // group)
        units = -(-groups * group // unit)
        return encode.bind(numel, width << 24 | extra, units), decode.bind(numel, width << 24, units)

    return Kernels(
        lambda src, out, numel, key: bind(numel)[0](src, out, key),
        lambda buf, out, numel, key: bind(numel)[1](buf, out, key),
        bind,
        rows,
    )


@inline
def row_of(index: Any, width: Any, group: Any) -> Any:
    """Find the row of a group, and the first element of the group in that."""
    parts = (width + group - 1) // group
    row = index // parts
    return row, (index - row * parts) * group


@inline
def run_of(index: Any, end: Any, width: Any, group: Any) -> Any:
    """Find the groups from `index` on, and before `end`, that are of one row.

    Returns the row, the first element in it, the number of elements, and the number of groups.
    """
    parts = (width + group - 1) // group
    row = index // parts
    part = index - row * parts
    groups = min(parts - part, end - index)
    start = part * group
    return row, start, min(groups * group, width - start), groups


@inline
def copy(source: Any, target: Any, nbytes: Any) -> None:
    for i in range(nbytes):
        put(u8_at(target), i, get(u8_at(source), i))


@inline
def copy_filled(source: Any, target: Any, count: Any, padded: Any, kind: Any) -> None:
    """Copy `count` elements, and repeat the last one up to `padded` elements."""
    if kind == F32:
        copy(source, target, count * 4)
        word = get(u32_at(source), count - 1)
        for i in range(count, padded):
            put(u32_at(target), i, word)
    else:
        copy(source, target, count * 2)
        half = get(u16_at(source), count - 1)
        for i in range(count, padded):
            put(u16_at(target), i, half)


@inline
def gather(source: Any, target: Any, first: Any, end: Any, width: Any, group: Any, kind: Any) -> None:
    """Copy groups `first` to `end` to whole groups side by side, short ones filled with their last element."""
    itemsize = 4 if kind == F32 else 2
    index = first
    while index < end:
        row, start, count, groups = run_of(index, end, width, group)
        place = target + (index - first) * group * itemsize
        copy_filled(source + (row * width + start) * itemsize, place, count, groups * group, kind)
        index += groups


@inline
def scatter(source: Any, target: Any, first: Any, end: Any, width: Any, group: Any, kind: Any) -> None:
    """Copy the elements of groups that lie as `gather` leaves them back to their rows."""
    itemsize = 4 if kind == F32 else 2
    index = first
    while index < end:
        row, start, count, groups = run_of(index, end, width, group)
        elements = target + (row * width + start) * itemsize
        copy(source + (index - first) * group * itemsize, elements, count * itemsize)
        index += groups


@inline
def clear(target: Any, nbytes: Any) -> None:
    for i in range(nbytes):
        put(u8_at(target), i, np.uint8(0))
