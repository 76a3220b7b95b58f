"""The choice of a window for the exponents of a tile of expack, on the CPU. The rule: csrc/expack.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from actstore.kernels.cpu.language import F16, get, inline, put, stack_of, u8_at, u16, u16_at
from actstore.kernels.cpu.planes import VECTOR_NBYTES, at_least, popcount, u64
from actstore.kernels.expack import BASE_AT, ESCAPES_AT, WIDTH_AT, WINDOW_DEPTH, ZERO_AT
from actstore.kernels.planes import PLANE_NBYTES, TILE

u8 = np.uint8
within_stack: Any = stack_of(2 * 2 * (WINDOW_DEPTH + 1))


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
