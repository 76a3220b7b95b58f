"""Groups that end with rows, on the CPU. The groups: csrc/rows.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from actstore.kernels.base import Bound, Kernels
from actstore.kernels.cpu.language import F32, Parallel, get, inline, put, u8_at, u16_at, u32_at


def with_rows(
    kernels: Kernels, compiled: Callable[[], tuple[Parallel, Parallel]], group: int, unit: int, extra: int = 0
) -> Kernels:
    """Return the same kernels, and those for rows, which are compiled at their first use.

    Their unit are `unit` elements of whole groups, a short group counted as a whole one, and their `extra` is the width
    of a row above 24 bits, with `extra` in these for encode.
    """
    ways: list[tuple[Parallel, Parallel]] = []

    def rows(numel: int, width: int) -> tuple[Bound, Bound]:
        if not ways:
            ways.append(compiled())
        encode, decode = ways[0]
        groups = numel // width * -(-width // group)
        units = -(-groups * group // unit)
        return encode.bind(numel, width << 24 | extra, units), decode.bind(numel, width << 24, units)

    return kernels._replace(rows=rows)


@inline
def place_of(index: Any, extra: Any, group: Any) -> Any:
    """Find the row of a group, its first element in that, and its number of elements."""
    width = extra >> 24
    parts = (width + group - 1) // group
    row = index // parts
    start = (index - row * parts) * group
    return row, start, min(group, width - start)


@inline
def run_of(index: Any, end: Any, extra: Any, group: Any) -> Any:
    """Find the groups from `index` on, and before `end`, that are of one row.

    Returns the row, the first element in it, the number of elements, and the number of groups.
    """
    width = extra >> 24
    parts = (width + group - 1) // group
    row = index // parts
    part = index - row * parts
    groups = min(parts - part, end - index)
    start = part * group
    return row, start, min(groups * group, width - start), groups


@inline
def _copy(source: Any, target: Any, count: Any, kind: Any) -> None:
    for i in range(count):
        if kind == F32:
            put(u32_at(target), i, get(u32_at(source), i))
        else:
            put(u16_at(target), i, get(u16_at(source), i))


@inline
def gather(source: Any, target: Any, first: Any, end: Any, extra: Any, group: Any, kind: Any) -> None:
    """Copy groups `first` to `end` to whole groups side by side, short ones filled with their last element."""
    itemsize = 4 if kind == F32 else 2
    index = first
    while index < end:
        row, start, count, groups = run_of(index, end, extra, group)
        elements = source + (row * (extra >> 24) + start) * itemsize
        filled = target + (index - first) * group * itemsize
        _copy(elements, filled, count, kind)
        if kind == F32:
            last_word = get(u32_at(elements), count - 1)
            for i in range(count, groups * group):
                put(u32_at(filled), i, last_word)
        else:
            last_half = get(u16_at(elements), count - 1)
            for i in range(count, groups * group):
                put(u16_at(filled), i, last_half)
        index += groups


@inline
def scatter(source: Any, target: Any, first: Any, end: Any, extra: Any, group: Any, kind: Any) -> None:
    """Copy the elements of groups that lie as `gather` leaves them back to their rows."""
    itemsize = 4 if kind == F32 else 2
    index = first
    while index < end:
        row, start, count, groups = run_of(index, end, extra, group)
        elements = target + (row * (extra >> 24) + start) * itemsize
        _copy(source + (index - first) * group * itemsize, elements, count, kind)
        index += groups


@inline
def clear(target: Any, nbytes: Any) -> None:
    for i in range(nbytes):
        put(u8_at(target), i, np.uint8(0))
