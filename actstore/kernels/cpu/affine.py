"""Affine blocks on the CPU, a tile at a time: first all ranges, then all scales, then all codes.

The bytes: csrc/affine.md.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from actstore.kernels.affine import LEVELS, widths
from actstore.kernels.base import Kernels
from actstore.kernels.cpu.affine_planes import MOST, pack, padded, section, unpack
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
    in_units,
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
)
from actstore.kernels.cpu.philox import NOISE_NUMEL, draw_noise, noise_stack, offset

TILE = NOISE_NUMEL  # elements
MAGIC = f32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer, ties to even, in the low bits
SMALLEST_MINIMUM = u32(0x08800000)  # 2^-110
SMALLEST_QUARTER = f32(2.0**-82)
LARGEST_QUARTER = f32((2 - 2.0**-7) * 2.0**125)  # of the largest bfloat16
QUARTER = f32(0.25)
ZERO = 0x4B400000  # the bits of MAGIC
NAN_CODE = np.uint8(128)

_u8, _i8, _i16, _i32 = np.uint8, np.int8, np.int16, np.int32
_elements_stack: Any = stack_of(4 * TILE)
_codes_stack: Any = stack_of(TILE)
_groups_stack: Any = stack_of(4 * TILE // 32)


@cache
def kernels(
    dtype: torch.dtype,
    device: torch.device,
    bits: int,
    group: int,
    round: str,  # noqa: A002
    keep: bool,
) -> Kernels:
    """Kernels for one dtype and set of options; compiled at first use, then read from numba's cache on disk."""
    unit_nbytes = TILE * dtype.itemsize
    run_encode = Parallel(_compile_encode(KINDS[dtype], bits, group, round != "nearest", keep), unit_nbytes)
    run_decode = Parallel(
        _compile_decode(KINDS[dtype], bits, group, round == "dither", keep and round == "dither"), unit_nbytes
    )
    return in_units(run_encode, run_decode, TILE)


@inline
def _load_ordered(source: Any, index: Any, kind: Any) -> Any:
    """The bits of element `index` as an integer in the order of the values: -NaN < -Inf < finite < Inf < NaN."""
    if kind == F32:
        word = get(i32_at(source), index)
        return _i32(word ^ _i32(_i32(word >> _i32(31)) & _i32(0x7FFFFFFF)))
    half = get(i16_at(source), index)
    return _i16(half ^ _i16(_i16(half >> _i16(15)) & _i16(0x7FFF)))


@inline
def _value(ordered: Any, kind: Any) -> Any:
    """The float32 value of a finite element in the form of `_load_ordered`."""
    magnitude = _i32(0x7FFFFFFF if kind == F32 else 0x7FFF)
    word = u32(_i32(ordered ^ _i32(_i32(ordered >> _i32(31)) & magnitude)))
    if kind == F32:
        return as_f32(word)
    if kind == BF16:
        return as_f32(u32(word << u32(16)))
    return f16_to_f32(u32(word & u32(0xFFFF)))


@inline
def _range(source: Any, start: Any, group: Any, kind: Any, inf: Any, bits: Any) -> Any:
    """The least and the largest element of a group, and whether all are finite; of 8 bits the finite elements only."""
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
def _bf16_down(value: Any) -> Any:
    """The bits of the next bfloat16 number below, the lowest one below that; 0 for tiny values."""
    word = as_u32(value)
    magnitude = u32(word & u32(0x7FFFFFFF))
    above = u32(min(u32(magnitude + u32(0xFFFF)), u32(0x7F7F0000)))
    bits = u32(u32(above | u32(0x80000000)) >> u32(16)) if word >= u32(0x80000000) else u32(word >> u32(16))
    return u32(0) if magnitude < SMALLEST_MINIMUM else bits


@inline
def _scale(low: Any, high: Any, levels: Any) -> Any:
    """The bits of the scale and of the minimum, a quarter of the minimum, and 4 / scale, or 0 in place of Inf."""
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
    """A finite float32 number of at least 0, rounded up to bfloat16."""
    return as_f32(u32(u32(as_u32(value) + u32(0xFFFF)) & u32(0xFFFF0000)))


@inline
def _around_zero(low: Any, high: Any, levels: Any, bits: Any) -> Any:
    """A quarter of the smallest step with which a power of two is the code of zero, and that code, of quarters."""
    low = max(low, -LARGEST_QUARTER)
    step, zero = f32(np.inf), _i32(1)
    for power in range(bits):
        code = f32(1 << power)
        found = max(_up(max(low * (f32(-1) / code), high / f32(levels - (1 << power)))), SMALLEST_QUARTER)
        better = found < step and found <= LARGEST_QUARTER / code
        step, zero = found if better else step, _i32(1 << power) if better else zero
    return step, zero


@inline
def _keeping_scale(low: Any, high: Any, levels: Any, bits: Any) -> Any:
    """What `_scale` gives, where signs are kept, and the code of zero; -1 where zero is below all elements."""
    scale, minimum, quarter, reciprocal = _scale(low, high, levels)
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
        most = high * QUARTER
        step = SMALLEST_QUARTER if most < SMALLEST_QUARTER else _up(most / f32(levels))
        empty = u32(as_u32(high) << u32(1)) == u32(0)
        scale = u32(0) if empty else u32(as_u32(step * f32(4)) >> u32(16))
        return scale, u32(0), f32(0), f32(0) if empty else f32(1) / step, _i32(0)
    return scale, minimum, quarter, reciprocal, _i32(-1)


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
        negative, nothing = word > u32(0x80000000), u32(word << u32(1)) == u32(0)
        kept = min(code, u32(zero - u32(1))) if negative else max(code, u32(zero + u32(1)))
        code = code if nothing else kept
    return _u8(u32(code + u32(129))) if bits == 8 else _u8(code)


@inline
def _copy(source: Any, target: Any, count: Any, padded: Any, kind: Any) -> None:
    """Copy `count` elements, and the last of them again up to `padded`."""
    for i in range(padded):
        if kind == F32:
            put(u32_at(target), i, get(u32_at(source), min(i, count - 1)))
        else:
            put(u16_at(target), i, get(u16_at(source), min(i, count - 1)))


def _compile_encode(kind: int, bits: int, group: int, noisy: bool, keep: bool) -> Any:
    inf = int(INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16)
    itemsize, levels, (low_bits, high_bits) = 4 if kind == F32 else 2, LEVELS[bits], widths(bits)

    @kernel
    def encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        noise = noise_stack() if noisy else 0
        lows, highs, finites = _groups_stack(), _groups_stack(), _groups_stack()
        quarters, reciprocals, zeros = _groups_stack(), _groups_stack(), _groups_stack()
        copy, bytes_ = _elements_stack(), _codes_stack()
        upper = payload + section(numel * low_bits)
        scales = upper + section(numel * high_bits)
        minima = scales + section(16 * -(-numel // group))
        for tile in range(first, last):
            elements, lower = source + tile * TILE * itemsize, payload + tile * (TILE * low_bits // 8)
            count = min(TILE, numel - tile * TILE)
            groups = -(-count // group)
            if noisy:
                draw_noise(noise, tile * TILE, key)
            if count < TILE:
                _copy(elements, copy, count, groups * group, kind)
                elements = copy

            for index in range(groups):
                low, high, finite = _range(elements, index * group, group, kind, inf, bits)
                put(i32_at(lows), index, low)
                put(i32_at(highs), index, high)
                put(u32_at(finites), index, u32(finite))
            for index in range(groups):
                low, high = _value(get(i32_at(lows), index), kind), _value(get(i32_at(highs), index), kind)
                if keep:
                    scale, minimum, quarter, reciprocal, zero = _keeping_scale(low, high, levels, bits)
                    put(u32_at(zeros), index, u32(zero + _i32(ZERO)))
                else:
                    scale, minimum, quarter, reciprocal = _scale(low, high, levels)
                if bits < 8:
                    known = get(u32_at(finites), index) != u32(0)
                    scale, minimum = scale if known else u32(0), minimum if known else u32(0x7FC0)
                put(u32_at(quarters), index, as_u32(quarter))
                put(u32_at(reciprocals), index, as_u32(reciprocal))
                put(u16_at(scales), tile * (TILE // group) + index, u16(scale))
                put(u16_at(minima), tile * (TILE // group) + index, u16(minimum))

            codes = lower if bits == 8 and count == TILE else bytes_
            for index in range(groups):
                quarter, reciprocal = as_f32(get(u32_at(quarters), index)), as_f32(get(u32_at(reciprocals), index))
                zero = get(u32_at(zeros), index) if keep else u32(0)
                start = index * group
                if get(u32_at(finites), index) != u32(0):
                    for i in range(start, start + group):
                        code = _code(elements, i, quarter, reciprocal, zero, noise, kind, bits, noisy, keep)
                        put(u8_at(codes), i, code)
                elif bits < 8:
                    for i in range(start, start + group):
                        put(u8_at(codes), i, _u8(0))
                else:
                    for i in range(start, start + group):
                        code = _code(elements, i, quarter, reciprocal, zero, noise, kind, bits, noisy, keep)
                        put(u8_at(codes), i, code if load_magnitude(elements, i, kind) < inf else NAN_CODE)
            if bits < 8 or count < TILE:
                for i in range(count, -(-count // MOST) * MOST):
                    put(u8_at(codes), i, _u8(0))
                pack(codes, lower, padded(count, low_bits), 0, low_bits)
                if high_bits:
                    above = upper + tile * (TILE * high_bits // 8)
                    pack(codes, above, padded(count, high_bits), low_bits, high_bits)
            if tile * TILE + count == numel:
                for i in range(2 * -(-numel // group), minima - scales):
                    put(u8_at(scales), i, _u8(0))

    return encode


def _compile_decode(kind: int, bits: int, group: int, dither: bool, keep: bool) -> Any:
    itemsize, (low_bits, high_bits) = 4 if kind == F32 else 2, widths(bits)

    @kernel
    def decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        noise = noise_stack() if dither else 0
        copy, bytes_ = _elements_stack(), _codes_stack()
        upper = payload + section(numel * low_bits)
        scales = upper + section(numel * high_bits)
        minima = scales + section(16 * -(-numel // group))
        for tile in range(first, last):
            elements, lower = target + tile * TILE * itemsize, payload + tile * (TILE * low_bits // 8)
            count = min(TILE, numel - tile * TILE)
            groups = -(-count // group)
            if dither:
                draw_noise(noise, tile * TILE, key)
            if count < TILE:
                elements = copy
            codes = lower if bits == 8 and count == TILE else bytes_
            if bits < 8 or count < TILE:
                unpack(lower, codes, padded(count, low_bits), 0, low_bits)
                if high_bits:
                    above = upper + tile * (TILE * high_bits // 8)
                    unpack(above, codes, padded(count, high_bits), low_bits, high_bits)
            for index in range(groups):
                minimum = u32(u32(get(u16_at(minima), tile * (TILE // group) + index)) << u32(16))
                scale = u32(u32(get(u16_at(scales), tile * (TILE // group) + index)) << u32(16))
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
            if count < TILE:
                _copy(copy, target + tile * TILE * itemsize, count, count, kind)

    return decode
