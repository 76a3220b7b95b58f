"""Tiles of affine blocks on the CPU: first all ranges, then all scales, then all codes. The bytes: csrc/affine.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from actstore.kernels.cpu.affine_scales import (
    QUARTER,
    away_from_zero,
    keeping_scale_of,
    scale_from_zero,
    scale_of,
)
from actstore.kernels.cpu.language import (
    BF16,
    F32,
    INF_BF16,
    INF_F16,
    INF_F32,
    as_f32,
    as_u32,
    f16_to_f32,
    f32,
    get,
    i16_at,
    i32_at,
    inline,
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
)
from actstore.kernels.cpu.philox import NOISE_NUMEL, offset

TILE = NOISE_NUMEL  # elements
MAGIC = f32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer, ties to even, in the low bits
ZERO = 0x4B400000  # the bits of MAGIC
NAN_CODE = np.uint8(128)

_u8, _i8, _i16, _i32 = np.uint8, np.int8, np.int16, np.int32
elements_stack: Any = stack_of(4 * TILE)
codes_stack: Any = stack_of(TILE)
groups_stack: Any = stack_of(4 * TILE // 32)


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
def copy_filled(source: Any, target: Any, count: Any, padded: Any, kind: Any) -> None:
    """Copy `count` elements, and repeat the last one up to `padded` elements."""
    for i in range(padded):
        if kind == F32:
            put(u32_at(target), i, get(u32_at(source), min(i, count - 1)))
        else:
            put(u16_at(target), i, get(u16_at(source), min(i, count - 1)))


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
