"""int8 by token axis on the CPU. The bytes: csrc/int8_token.md."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch

from actstore.kernels.base import Kernels, payload_pointer
from actstore.kernels.cpu.int8 import FLUSH, LEAST_SCALE, code_of
from actstore.kernels.cpu.int8 import kernels as element_kernels
from actstore.kernels.cpu.language import (
    BF16,
    F32,
    INF_BF16,
    INF_F16,
    INF_F32,
    KINDS,
    Parallel,
    as_f32,
    as_u32,
    f32,
    f32_magnitude,
    get,
    i8_at,
    inline,
    kernel,
    load,
    load_bits,
    load_magnitude,
    put,
    stack_of,
    store,
    u8_at,
    u16,
    u16_at,
    u32,
    u32_at,
)
from actstore.kernels.cpu.philox import offset, philox
from actstore.kernels.cpu.unsigned import LANES, put_codes

SEGMENT_COLUMNS = 512  # elements of a row in a unit of work: `group` such segments fit into the second-level cache
UNROLLED_ROWS = 4  # rows whose maximum is taken before it meets that on the stack; divides every group
GROUP_BITS = 11  # of `extra`, which holds columns and group: a kernel for each group would not be faster
tops_stack: Any = stack_of(4 * SEGMENT_COLUMNS)
scales_stack: Any = stack_of(4 * SEGMENT_COLUMNS)
noise_stack: Any = stack_of(SEGMENT_COLUMNS + 16)


@cache
def kernels(dtype: torch.dtype, device: torch.device, group: int, round: str, keep: bool) -> Kernels:  # noqa: A002
    """Return the kernels for one dtype and set of options; compiled at first use, then read from numba's disk cache."""
    unit_nbytes = group * SEGMENT_COLUMNS * dtype.itemsize
    run_encode = Parallel(_compile_encode(KINDS[dtype], round != "nearest", keep), unit_nbytes)
    run_decode = Parallel(_compile_decode(KINDS[dtype], round == "dither", keep and round == "dither"), unit_nbytes)
    along_elements = element_kernels(dtype, device, group, round, keep)

    def units(numel: int, columns: int) -> int:
        return -(-numel // (columns * group)) * -(-columns // SEGMENT_COLUMNS)

    def encode(numel: int, columns: int, src: torch.Tensor, out: torch.Tensor, key: int) -> None:
        extra = columns << GROUP_BITS | group
        run_encode(src.data_ptr(), payload_pointer(out), numel, key, extra, units(numel, columns))

    def decode(numel: int, columns: int, buf: torch.Tensor, out: torch.Tensor, key: int) -> None:
        extra = columns << GROUP_BITS | group
        run_decode(payload_pointer(buf), out.data_ptr(), numel, key, extra, units(numel, columns))

    return along_elements._replace(
        rows=lambda numel, columns: (partial(encode, numel, columns), partial(decode, numel, columns))
    )


@inline
def _tile(unit: Any, numel: Any, columns: Any, group: Any) -> Any:
    """Find the tile of a unit: first element, first scale, columns, rows, and the number of rows in one segment.

    Several rows shorter than half a segment count as one row whose columns repeat.
    """
    parts = (columns + SEGMENT_COLUMNS - 1) // SEGMENT_COLUMNS
    width = ((columns + parts - 1) // parts + 63) & -64
    first, column = unit // parts, unit % parts * width
    rows = min(group, numel // columns - first * group)
    folds = 1
    if rows == group:
        while 2 * folds * columns <= SEGMENT_COLUMNS and 2 * UNROLLED_ROWS * folds <= group:
            folds *= 2
    return first * group * columns + column, first * columns + column, min(width, columns - column), rows, folds


@inline
def _clear(tops: Any, count: Any, kind: Any) -> None:
    for c in range(count):
        if kind == F32:
            put(u32_at(tops), c, u32(0))
        else:
            put(u16_at(tops), c, u16(0))


@inline
def _raise_top(tops: Any, c: Any, magnitude: Any, kind: Any) -> None:
    if kind == F32:
        put(u32_at(tops), c, max(get(u32_at(tops), c), magnitude))
    else:
        put(u16_at(tops), c, max(get(u16_at(tops), c), magnitude))


@inline
def _bits(source: Any, i: Any, kind: Any, signs: Any) -> Any:
    return load_bits(source, i, kind) if signs else load_magnitude(source, i, kind)


@inline
def _raise_tops(source: Any, tops: Any, start: Any, stride: Any, rows: Any, count: Any, kind: Any, signs: Any) -> Any:
    """Find the largest bits of each column, with sign bits or without; return the largest of all."""
    _clear(tops, count, kind)
    unrolled = rows - rows % UNROLLED_ROWS
    for row in range(0, unrolled, UNROLLED_ROWS):
        at = start + row * stride
        for c in range(count):
            one = max(_bits(source, at + c, kind, signs), _bits(source, at + stride + c, kind, signs))
            two = max(_bits(source, at + 2 * stride + c, kind, signs), _bits(source, at + 3 * stride + c, kind, signs))
            _raise_top(tops, c, max(one, two), kind)
    for row in range(unrolled, rows):
        for c in range(count):
            _raise_top(tops, c, _bits(source, start + row * stride + c, kind, signs), kind)

    top: Any = u32(0) if kind == F32 else u16(0)
    for c in range(count):
        top = max(top, get(u32_at(tops), c) if kind == F32 else get(u16_at(tops), c))
    return top


@inline
def _find_tops(source: Any, tops: Any, start: Any, stride: Any, rows: Any, count: Any, kind: Any, keep: Any) -> Any:
    """Find the largest finite magnitude of each column; return whether all are finite, and whether no sign bit is set.

    Without `keep` the caller does not need the second result: it is False then.
    """
    inf: Any = INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16
    if keep and _raise_tops(source, tops, start, stride, rows, count, kind, True) < inf:
        return True, True
    finite = _raise_tops(source, tops, start, stride, rows, count, kind, False) < inf
    if not finite:
        _clear(tops, count, kind)
        for row in range(rows):
            for c in range(count):
                magnitude = load_magnitude(source, start + row * stride + c, kind)
                zero: Any = u32(0) if kind == F32 else u16(0)
                _raise_top(tops, c, magnitude if magnitude < inf else zero, kind)
    return finite, False


@inline
def _find_scales(tops: Any, reciprocals: Any, scales: Any, first: Any, count: Any, kind: Any, keep: Any) -> None:
    for c in range(count):
        bits = f32_magnitude(get(u32_at(tops), c) if kind == F32 else get(u16_at(tops), c), kind)
        scale = u32(u32(as_u32(as_f32(bits) / f32(127)) + u32(0xFFFF)) & u32(0xFFFF0000))
        large = bits >= FLUSH
        small = (LEAST_SCALE if bits != u32(0) else u32(0)) if keep else u32(0)
        put(u16_at(scales), first + c, u16(u32(scale >> u32(16))) if large else u16(small))
        reciprocal = as_u32(f32(1) / as_f32(scale))
        put(u32_at(reciprocals), c, reciprocal if large else u32(0))


@inline
def _repeat(values: Any, columns: Any, folds: Any) -> None:
    for fold in range(1, folds):
        for c in range(columns):
            put(u32_at(values), fold * columns + c, get(u32_at(values), c))


@inline
def _draw(noise: Any, start: Any, count: Any, key: Any) -> Any:
    """Draw the noise of elements `start` to `start + count`, and return the address for `offset`."""
    words, first = u32_at(noise), start // 16
    for block in range((start + count + 15) // 16 - first):
        a, b, c, d = philox(first + block, 0, key)
        put(words, 4 * block, a)
        put(words, 4 * block + 1, b)
        put(words, 4 * block + 2, c)
        put(words, 4 * block + 3, d)
    return noise - 16 * first


@inline
def _code(
    source: Any,
    i: Any,
    reciprocals: Any,
    c: Any,
    noise: Any,
    kind: Any,
    noisy: Any,
    keep: Any,
    unsigned: Any = False,
) -> Any:
    value = load(source, i, kind)
    steps = value * as_f32(get(u32_at(reciprocals), c))
    if noisy:
        steps = steps + offset(noise, i)
    return code_of(value, steps, keep, unsigned)


def _compile_encode(kind: int, noisy: bool, keep: bool) -> Any:
    @kernel
    def encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        columns, group = extra >> GROUP_BITS, extra & ((1 << GROUP_BITS) - 1)
        inf: Any = INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16
        scales = payload + ((numel + 15) & -16)
        tops, reciprocals = tops_stack(), scales_stack()
        noise = noise_stack() if noisy else 0
        for unit in range(first, last):
            start, scale, width, rows, folds = _tile(unit, numel, columns, group)
            count, stride = width * folds, columns * folds
            rows = rows // folds
            finite, unsigned = _find_tops(source, tops, start, stride, rows, count, kind, keep)
            for fold in range(1, folds):
                for c in range(width):
                    at = fold * width + c
                    _raise_top(tops, c, get(u32_at(tops), at) if kind == F32 else get(u16_at(tops), at), kind)
            _find_scales(tops, reciprocals, scales, scale, width, kind, keep)
            _repeat(reciprocals, width, folds)
            for row in range(rows):
                at = start + row * stride
                drawn = _draw(noise, at, count, key) if noisy else 0
                if keep and unsigned:
                    itemsize = 4 if kind == F32 else 2
                    whole = count & -LANES
                    for c in range(0, whole, LANES):
                        put_codes(
                            source + (at + c) * itemsize,
                            payload + at + c,
                            reciprocals + 4 * c,
                            drawn + at + c,
                            kind,
                            noisy,
                        )
                    for c in range(whole, count):
                        code = _code(source, at + c, reciprocals, c, drawn, kind, noisy, keep, True)
                        put(u8_at(payload), at + c, code)
                elif finite:
                    for c in range(count):
                        put(u8_at(payload), at + c, _code(source, at + c, reciprocals, c, drawn, kind, noisy, keep))
                else:
                    for c in range(count):
                        code = _code(source, at + c, reciprocals, c, drawn, kind, noisy, keep)
                        good = load_magnitude(source, at + c, kind) < inf
                        put(u8_at(payload), at + c, code if good else np.uint8(128))
        if first == 0:
            for i in range(numel, scales - payload):
                put(u8_at(payload), i, np.uint8(0))

    return encode


def _compile_decode(kind: int, dither: bool, keep: bool) -> Any:
    @kernel
    def decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        columns, group = extra >> GROUP_BITS, extra & ((1 << GROUP_BITS) - 1)
        scales = payload + ((numel + 15) & -16)
        wide = scales_stack()
        noise = noise_stack() if dither else 0
        for unit in range(first, last):
            start, scale, width, rows, folds = _tile(unit, numel, columns, group)
            count, stride = width * folds, columns * folds
            for c in range(width):
                put(u32_at(wide), c, u32(u32(get(u16_at(scales), scale + c)) << u32(16)))
            _repeat(wide, width, folds)
            for row in range(rows // folds):
                at = start + row * stride
                drawn = _draw(noise, at, count, key) if dither else 0
                for c in range(count):
                    code = get(i8_at(payload), at + c)
                    steps = f32(code)
                    if dither:
                        steps = steps if keep and code == np.int8(0) else steps - offset(drawn, at + c)
                    store(target, at + c, steps * as_f32(get(u32_at(wide), c)), code == np.int8(-128), kind)

    return decode
