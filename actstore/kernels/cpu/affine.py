"""Affine blocks on the CPU, a tile at a time. The bytes: csrc/affine.md.

Of each tile first all ranges are found, then all scales, then all codes, a byte for each, which are packed into planes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from actstore.kernels.affine import LEVELS, widths
from actstore.kernels.base import Kernels
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
    f16_to_f32,
    f32,
    get,
    i16_at,
    i32_at,
    inline,
    kernel,
    load,
    load_magnitude,
    put,
    stack_of,
    store,
    u8_at,
    u16,
    u16_at,
    u32,
    u32_at,
    u64_at,
)
from actstore.kernels.cpu.philox import draw_noise, noise_stack, offset
from actstore.kernels.cpu.rows import TILE, clear, codes_stack, elements_stack, gather, in_rows, run_of, scatter

SMALLEST_MINIMUM = u32(0x08800000)  # 2^-110
SMALLEST_QUARTER = f32(2.0**-82)
LARGEST_QUARTER = f32((2 - 2.0**-7) * 2.0**125)  # of the largest bfloat16
QUARTER = f32(0.25)
MAGIC = f32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer, ties to even, in the low bits
ZERO = 0x4B400000  # the bits of MAGIC
NAN_CODE = np.uint8(128)

_u8, _i8, _i16, _i32, _u64 = np.uint8, np.int8, np.int16, np.int32, np.uint64
groups_stack: Any = stack_of(4 * TILE // 32)


@inline
def _bf16_down(value: Any) -> Any:
    """Round down to bfloat16, and return the bits; the lowest number for values below it, 0 for tiny values."""
    word = as_u32(value)
    magnitude = u32(word & u32(0x7FFFFFFF))
    above = u32(min(u32(magnitude + u32(0xFFFF)), u32(0x7F7F0000)))
    bits = u32(u32(above | u32(0x80000000)) >> u32(16)) if word >= u32(0x80000000) else u32(word >> u32(16))
    return u32(0) if magnitude < SMALLEST_MINIMUM else bits


@inline
def scale_of(low: Any, high: Any, levels: Any) -> Any:
    """Return the bits of scale and minimum, a quarter of the minimum, and 4 / scale, or 0 in place of Inf."""
    minimum = _bf16_down(low)
    quarter = as_f32(u32(minimum << u32(16))) * QUARTER
    spread = high * QUARTER - quarter
    step = as_f32(u32(u32(as_u32(spread / f32(levels)) + u32(0xFFFF)) & u32(0xFFFF0000)))
    reciprocal = f32(1) / step
    scale = u32(as_u32(step * f32(4)) >> u32(16))
    constant = spread < SMALLEST_QUARTER
    return u32(0) if constant else scale, minimum, quarter, f32(0) if constant else reciprocal


@inline
def _up(value: Any) -> Any:
    """Round a finite float32 number of at least 0 up to bfloat16."""
    return as_f32(u32(u32(as_u32(value) + u32(0xFFFF)) & u32(0xFFFF0000)))


@inline
def scale_from_zero(high: Any, levels: Any) -> Any:
    """Return the bits of the scale of a group from 0 to `high`, and 4 / scale; both 0 where all is zero."""
    most = high * QUARTER
    step = SMALLEST_QUARTER if most < SMALLEST_QUARTER else _up(most / f32(levels))
    empty = _i32(as_u32(high)) <= _i32(0)  # as floats, LLVM would take a denormal for a zero where the processor does
    scale = u32(as_u32(step * f32(4)) >> u32(16))
    return u32(0) if empty else scale, f32(0) if empty else f32(1) / step


@inline
def away_from_zero(low: Any) -> Any:
    """Return 0 where the least element of a group, as an integer in the order of the values, is 0.0 or -0.0."""
    return u32(u32(low + _i32(1)) >> u32(1))


@inline
def _around_zero(low: Any, high: Any, levels: Any, bits: Any) -> Any:
    """Find a quarter of the smallest step with which a power of two is the code of zero, and that code.

    `low` and `high` are quarters of the bounds of the group.
    """
    low = max(low, -LARGEST_QUARTER)
    step, zero = f32(np.inf), _i32(1)
    for power in range(bits):
        code = f32(1 << power)
        found = max(_up(max(low * (f32(-1) / code), high / f32(levels - (1 << power)))), SMALLEST_QUARTER)
        better = found < step and found <= LARGEST_QUARTER / code
        step, zero = found if better else step, _i32(1 << power) if better else zero
    return step, zero


@inline
def keeping_scale_of(low: Any, high: Any, levels: Any, bits: Any) -> Any:
    """Return the same as `scale_of`, with signs kept, and the code of zero; -1 where zero is below all elements."""
    scale, minimum, quarter, reciprocal = scale_of(low, high, levels)
    word = as_u32(low)
    if word > u32(0x80000000):
        step, zero = _around_zero(low * QUARTER, high * QUARTER, levels, bits)
        quarter = -f32(zero) * step
        return (
            u32(as_u32(step * f32(4)) >> u32(16)),
            u32(as_u32(quarter * f32(4)) >> u32(16)),
            quarter,
            f32(1) / step,
            zero,
        )
    if minimum == u32(0) or quarter < as_f32(u32(scale << u32(16))) * QUARTER:
        scale, reciprocal = scale_from_zero(high, levels)
        return scale, u32(0), f32(0), reciprocal, _i32(0)
    return scale, minimum, quarter, reciprocal, _i32(-1)


@inline
def _load_ordered(source: Any, index: Any, kind: Any) -> Any:
    """Load element `index` as an integer in the order of the values: -NaN < -Inf < finite < Inf < NaN."""
    if kind == F32:
        word = get(i32_at(source), index)
        return _i32(word ^ _i32(_i32(word >> _i32(31)) & _i32(0x7FFFFFFF)))
    half = get(i16_at(source), index)
    return _i16(half ^ _i16(_i16(half >> _i16(15)) & _i16(0x7FFF)))


@inline
def _value(ordered: Any, kind: Any) -> Any:
    """Convert a finite element in the form of `_load_ordered` to float32."""
    magnitude = _i32(0x7FFFFFFF if kind == F32 else 0x7FFF)
    word = u32(_i32(ordered ^ _i32(_i32(ordered >> _i32(31)) & magnitude)))
    if kind == F32:
        return as_f32(word)
    if kind == BF16:
        return as_f32(u32(word << u32(16)))
    return f16_to_f32(u32(word & u32(0xFFFF)))


@inline
def _range(source: Any, start: Any, group: Any, kind: Any, inf: Any, bits: Any) -> Any:
    """Find the least and the largest element of a group, for 8 bits of the finite ones, and whether all are finite."""
    first = _load_ordered(source, start, kind)
    low, high = first, first
    for i in range(start, start + group):
        element = _load_ordered(source, i, kind)
        low, high = min(low, element), max(high, element)
    finite = low >= -inf and high < inf
    if bits == 8 and not finite:
        least, most = _i32(0x7FFFFFFF), _i32(-0x7FFFFFFF)
        for i in range(start, start + group):
            element = _i32(_load_ordered(source, i, kind))
            if -inf <= element < inf:
                least, most = min(least, element), max(most, element)
        if least > most:
            return _i32(0), _i32(0), finite
        return least, most, finite
    return _i32(low), _i32(high), finite


@inline
def _code_from_zero(value: Any, factor: Any, noise: Any, i: Any, bits: Any, noisy: Any) -> Any:
    """Return the code of an element, at least 1 where it is not zero; `factor` is 1 / scale, for two bits 4 / scale."""
    steps = value * QUARTER * factor if bits == 2 else value * factor
    if noisy:
        steps = steps + offset(noise, i)
    code = _u8(as_u32(steps + MAGIC))
    kept = max(code, _u8(1)) if _i32(as_u32(value)) > _i32(0) else _u8(0)
    return _u8(kept + _u8(129)) if bits == 8 else kept


@inline
def _code(
    source: Any,
    i: Any,
    quarter: Any,
    reciprocal: Any,
    zero: Any,
    noise: Any,
    kind: Any,
    bits: Any,
    noisy: Any,
    keep: Any,
) -> Any:
    value = load(source, i, kind)
    above = value * QUARTER - quarter
    steps = max(above, f32(0)) * reciprocal
    if noisy:
        steps = steps + offset(noise, i)
    code = as_u32(steps + MAGIC)
    if keep:
        word = as_u32(value)
        above_zero = max(code, u32(zero + u32(1))) if _i32(word) > _i32(0) else code
        code = min(code, u32(zero - u32(1))) if word > u32(0x80000000) else above_zero
    return _u8(u32(code + u32(129))) if bits == 8 else _u8(code)


@inline
def ranges_of(elements: Any, stacks: Any, groups: Any, group: Any, kind: Any, inf: Any, bits: Any, keep: Any) -> Any:
    """Store the results of `_range` for the groups of a tile.

    Return whether signs are kept, and all groups are finite and start at zero.
    """
    lows, highs, finites, _quarters, _reciprocals, _zeros = stacks
    below, missing = u32(0), u32(0)
    for index in range(groups):
        low, high, finite = _range(elements, index * group, group, kind, inf, bits)
        put(i32_at(lows), index, low)
        put(i32_at(highs), index, high)
        put(u32_at(finites), index, u32(finite))
        below, missing = u32(below | away_from_zero(low)), u32(missing | u32(not finite))
    return keep and u32(below | missing) == u32(0)


@inline
def scales_of(stacks: Any, scales: Any, minima: Any, groups: Any, kind: Any, levels: Any, bits: Any, keep: Any) -> None:
    """Store the scales and the minima of the groups of a tile, and the numbers that `codes_of` needs."""
    lows, highs, finites, quarters, reciprocals, zeros = stacks
    for index in range(groups):
        low, high = _value(get(i32_at(lows), index), kind), _value(get(i32_at(highs), index), kind)
        if keep:
            scale, minimum, quarter, reciprocal, zero = keeping_scale_of(low, high, levels, bits)
            put(u32_at(zeros), index, u32(zero + _i32(ZERO)))
        else:
            scale, minimum, quarter, reciprocal = scale_of(low, high, levels)
        if bits < 8:
            known = get(u32_at(finites), index) != u32(0)
            scale, minimum = scale if known else u32(0), minimum if known else u32(0x7FC0)
        put(u32_at(quarters), index, as_u32(quarter))
        put(u32_at(reciprocals), index, as_u32(reciprocal))
        put(u16_at(scales), index, u16(scale))
        put(u16_at(minima), index, u16(minimum))


@inline
def scales_from_zero(stacks: Any, scales: Any, minima: Any, groups: Any, kind: Any, levels: Any, bits: Any) -> None:
    """Store the same as `scales_of`, for a tile whose groups all start at zero."""
    _lows, highs, _finites, _quarters, reciprocals, _zeros = stacks
    for index in range(groups):
        scale, reciprocal = scale_from_zero(_value(get(i32_at(highs), index), kind), levels)
        put(u32_at(reciprocals), index, as_u32(reciprocal if bits == 2 else reciprocal * QUARTER))
        put(u16_at(scales), index, u16(scale))
        put(u16_at(minima), index, u16(0))


@inline
def codes_of(
    elements: Any,
    codes: Any,
    stacks: Any,
    noise: Any,
    groups: Any,
    group: Any,
    kind: Any,
    bits: Any,
    noisy: Any,
    keep: Any,
) -> None:
    """Store the codes of a tile, one per byte."""
    inf: Any = INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16
    _lows, _highs, finites, quarters, reciprocals, zeros = stacks
    for index in range(groups):
        quarter, reciprocal = as_f32(get(u32_at(quarters), index)), as_f32(get(u32_at(reciprocals), index))
        zero = get(u32_at(zeros), index) if keep else u32(0)
        start = index * group
        if get(u32_at(finites), index) != u32(0):
            for i in range(start, start + group):
                put(u8_at(codes), i, _code(elements, i, quarter, reciprocal, zero, noise, kind, bits, noisy, keep))
        elif bits < 8:
            for i in range(start, start + group):
                put(u8_at(codes), i, _u8(0))
        else:
            for i in range(start, start + group):
                code = _code(elements, i, quarter, reciprocal, zero, noise, kind, bits, noisy, keep)
                put(u8_at(codes), i, code if load_magnitude(elements, i, kind) < inf else NAN_CODE)


@inline
def codes_from_zero(
    elements: Any, codes: Any, stacks: Any, noise: Any, groups: Any, group: Any, kind: Any, bits: Any, noisy: Any
) -> None:
    """Store the same as `codes_of`, for a tile whose groups all start at zero."""
    _lows, _highs, _finites, _quarters, reciprocals, _zeros = stacks
    for index in range(groups):
        factor = as_f32(get(u32_at(reciprocals), index))
        for i in range(index * group, index * group + group):
            put(u8_at(codes), i, _code_from_zero(load(elements, i, kind), factor, noise, i, bits, noisy))


@inline
def encode_groups(
    elements: Any,
    codes: Any,
    stacks: Any,
    scales: Any,
    minima: Any,
    noise: Any,
    groups: Any,
    group: Any,
    kind: Any,
    inf: Any,
    levels: Any,
    bits: Any,
    noisy: Any,
    keep: Any,
) -> None:
    """Store the codes of the whole groups of a tile, one per byte, their scales and their minima."""
    if ranges_of(elements, stacks, groups, group, kind, inf, bits, keep) and keep:  # after ReLU
        scales_from_zero(stacks, scales, minima, groups, kind, levels, bits)
        codes_from_zero(elements, codes, stacks, noise, groups, group, kind, bits, noisy)
    else:
        scales_of(stacks, scales, minima, groups, kind, levels, bits, keep)
        codes_of(elements, codes, stacks, noise, groups, group, kind, bits, noisy, keep)


@inline
def decode_groups(
    codes: Any,
    scales: Any,
    minima: Any,
    elements: Any,
    noise: Any,
    groups: Any,
    group: Any,
    kind: Any,
    bits: Any,
    dither: Any,
    keep: Any,
) -> None:
    """Store the elements of the whole groups of a tile."""
    for index in range(groups):
        minimum = u32(u32(get(u16_at(minima), index)) << u32(16))
        scale = u32(u32(get(u16_at(scales), index)) << u32(16))
        quarter, step = as_f32(minimum) * QUARTER, as_f32(scale) * QUARTER
        unknown = u32(minimum & u32(0x7FFFFFFF)) >= INF_F32
        start = index * group
        for i in range(start, start + group):
            code = get(u8_at(codes), i)
            steps = f32(_i8(code)) + f32(127) if bits == 8 else f32(code)
            if dither:
                silent = keep and quarter + steps * step == f32(0)
                steps = steps if silent else steps - offset(noise, i)
            missing = unknown or (bits == 8 and code == NAN_CODE)
            store(elements, i, (quarter + steps * step) * f32(4), missing, kind)


@inline
def pack(codes: Any, packed: Any, count: Any, shift: Any, width: Any) -> None:
    """Pack `width` bits, from bit `shift` on, of bytes with one code each, side by side, the first ones lowest."""
    if width == 8:
        for i in range(count):
            put(u8_at(packed), i, get(u8_at(codes), i))
    elif width == 4:
        for i in range(count // 2):
            pair = u16(u16(get(u16_at(codes), i) >> u16(shift)) & u16(0x0F0F))
            put(u8_at(packed), i, _u8(u16(pair | u16(pair >> u16(4)))))
    elif width == 2:
        for i in range(count // 4):
            four = u32(u32(get(u32_at(codes), i) >> u32(shift)) & u32(0x03030303))
            folded = u32(four | u32(four >> u32(6)))
            put(u8_at(packed), i, _u8(u32(folded | u32(folded >> u32(12)))))
    else:
        for i in range(count // 8):
            eight = _u64(_u64(get(u64_at(codes), i) >> _u64(shift)) & _u64(0x0101010101010101))
            folded8 = _u64(eight | _u64(eight >> _u64(7)))
            folded8 = _u64(folded8 | _u64(folded8 >> _u64(14)))
            put(u8_at(packed), i, _u8(_u64(folded8 | _u64(folded8 >> _u64(28)))))


@inline
def unpack(packed: Any, codes: Any, count: Any, shift: Any, width: Any) -> None:
    """Unpack the bytes of `pack`: the first plane, with `shift` 0, sets the codes; the second is added to them."""
    if width == 8:
        for i in range(count):
            put(u8_at(codes), i, get(u8_at(packed), i))
    elif width == 4:
        for i in range(count // 2):
            pair = u16(get(u8_at(packed), i))
            put(u16_at(codes), i, u16(u16(pair | u16(pair << u16(4))) & u16(0x0F0F)))
    elif width == 2:
        for i in range(count // 4):
            four = u32(get(u8_at(packed), i))
            spread = u32(four | u32(four << u32(6)))
            spread = u32(u32(spread | u32(spread << u32(12))) & u32(0x03030303))
            before = get(u32_at(codes), i) if shift else u32(0)
            put(u32_at(codes), i, u32(before | u32(spread << u32(shift))))
    else:
        for i in range(count // 8):
            eight = _u64(get(u8_at(packed), i))
            spread8 = _u64(eight | _u64(eight << _u64(28)))
            spread8 = _u64(spread8 | _u64(spread8 << _u64(14)))
            spread8 = _u64(_u64(spread8 | _u64(spread8 << _u64(7))) & _u64(0x0101010101010101))
            put(u64_at(codes), i, _u64(get(u64_at(codes), i) | _u64(spread8 << _u64(shift))))


@inline
def section(count: Any) -> Any:
    """Return the bytes of a section of `count` bits, up to the next multiple of 16."""
    return ((count + 127) >> 7) << 4


@cache
def kernels(
    dtype: torch.dtype,
    device: torch.device,
    bits: int,
    group: int,
    round: str,  # noqa: A002
    keep: bool,
) -> Kernels:
    """Return the kernels for one dtype and set of options; compiled at first use, then read from numba's disk cache."""
    noisy, dither, unit_nbytes = round != "nearest", round == "dither", TILE * dtype.itemsize
    return in_rows(
        Parallel(_compile_encode(KINDS[dtype], bits, group, noisy, keep), unit_nbytes),
        Parallel(_compile_decode(KINDS[dtype], bits, group, dither, keep and dither), unit_nbytes),
        group,
        TILE,
    )


def _compile_encode(kind: int, bits: int, group: int, noisy: bool, keep: bool) -> Any:
    inf = int(INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16)
    itemsize, levels, (low_bits, high_bits) = 4 if kind == F32 else 2, LEVELS[bits], widths(bits)

    @kernel
    def encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        noise = noise_stack() if noisy else 0
        lows, highs, finites = groups_stack(), groups_stack(), groups_stack()
        quarters, reciprocals, zeros = groups_stack(), groups_stack(), groups_stack()
        stacks = (lows, highs, finites, quarters, reciprocals, zeros)
        filled, apart = elements_stack(), codes_stack()
        width = extra >> 24
        rows, parts = numel // width, -(-width // group)
        low_nbytes, high_nbytes = (width * low_bits + 7) // 8, (width * high_bits + 7) // 8
        upper = payload + section(8 * rows * low_nbytes)
        scales = upper + section(8 * rows * high_nbytes)
        minima = scales + section(16 * rows * parts)
        for tile in range(first, last):
            start = tile * (TILE // group)
            end = min(start + TILE // group, rows * parts)
            if noisy:
                draw_noise(noise, tile * TILE, key)
            row, at, whole, _ = run_of(start, end, width, group)
            elements, codes = source + (row * width + at) * itemsize, apart
            if whole < TILE:
                gather(source, filled, start, end, width, group, kind)
                elements = filled
            elif bits == 8:
                codes = payload + row * width + at
            encode_groups(
                elements, codes, stacks, scales + 2 * start, minima + 2 * start, noise, end - start, group, kind, inf,
                levels, bits, noisy, keep,
            )  # fmt: skip
            index = start
            while index < end and (bits < 8 or whole < TILE):
                row, at, count, passed = run_of(index, end, width, group)
                each = codes + (index - start) * group
                lower, above = payload + row * low_nbytes, upper + row * high_nbytes
                clear(each + count, -count & 7)
                most = (count * low_bits + 7) // 8 * (8 // low_bits)
                pack(each, lower + at * low_bits // 8, most, 0, low_bits)
                if high_bits:
                    most = (count * high_bits + 7) // 8 * (8 // high_bits)
                    pack(each, above + at * high_bits // 8, most, low_bits, high_bits)
                index += passed
            if end == rows * parts:
                clear(payload + rows * low_nbytes, upper - payload - rows * low_nbytes)
                clear(upper + rows * high_nbytes, scales - upper - rows * high_nbytes)
                clear(scales + 2 * rows * parts, minima - scales - 2 * rows * parts)

    return encode


def _compile_decode(kind: int, bits: int, group: int, dither: bool, keep: bool) -> Any:
    itemsize, (low_bits, high_bits) = 4 if kind == F32 else 2, widths(bits)

    @kernel
    def decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        noise = noise_stack() if dither else 0
        filled, apart = elements_stack(), codes_stack()
        width = extra >> 24
        rows, parts = numel // width, -(-width // group)
        low_nbytes, high_nbytes = (width * low_bits + 7) // 8, (width * high_bits + 7) // 8
        upper = payload + section(8 * rows * low_nbytes)
        scales = upper + section(8 * rows * high_nbytes)
        minima = scales + section(16 * rows * parts)
        for tile in range(first, last):
            start = tile * (TILE // group)
            end = min(start + TILE // group, rows * parts)
            if dither:
                draw_noise(noise, tile * TILE, key)
            row, at, whole, _ = run_of(start, end, width, group)
            elements, codes = target + (row * width + at) * itemsize, apart
            if whole < TILE:
                elements = filled
            elif bits == 8:
                codes = payload + row * width + at
            index = start
            while index < end and (bits < 8 or whole < TILE):
                row, at, count, passed = run_of(index, end, width, group)
                each = codes + (index - start) * group
                lower, above = payload + row * low_nbytes, upper + row * high_nbytes
                most = (count * low_bits + 7) // 8 * (8 // low_bits)
                unpack(lower + at * low_bits // 8, each, most, 0, low_bits)
                if high_bits:
                    most = (count * high_bits + 7) // 8 * (8 // high_bits)
                    unpack(above + at * high_bits // 8, each, most, low_bits, high_bits)
                index += passed
            scales_at, minima_at = scales + 2 * start, minima + 2 * start
            decode_groups(codes, scales_at, minima_at, elements, noise, end - start, group, kind, bits, dither, keep)
            if whole < TILE:
                scatter(filled, target, start, end, width, group, kind)

    return decode
