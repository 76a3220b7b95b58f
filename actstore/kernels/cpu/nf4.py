"""nf4 on the CPU. The bytes: csrc/nf4.md."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from actstore.kernels.base import Kernels
from actstore.kernels.cpu.groups import largest_of
from actstore.kernels.cpu.language import (
    BF16,
    F16,
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
    inline,
    kernel,
    load,
    put,
    stack_of,
    store,
    u8_at,
    u16,
    u16_at,
    u32,
    u32_at,
)
from actstore.kernels.cpu.rows import TILE, clear, codes_stack, copy, elements_stack, in_rows, run_of, scatter
from actstore.kernels.nf4 import BNB_LEAST, BOUNDS, FLUSH, LARGEST, NAN, VALUES, ZERO

ZEROS = np.uint8(ZERO << 4 | ZERO)

_B1 = tuple(f32(bound) for bound in BOUNDS)
_B4 = tuple(f32(4 * bound) for bound in BOUNDS)
_V = tuple(f32(value) for value in VALUES)

_packed_stack: Any = stack_of(TILE // 2)
_groups_stack: Any = stack_of(4 * TILE // 32)


@cache
def kernels(dtype: torch.dtype, device: torch.device, group: int, layout: str, keep: bool) -> Kernels:
    """Return the kernels for one dtype and set of options; compiled at first use, then read from numba's disk cache."""
    unit_nbytes = TILE * dtype.itemsize
    kernels = in_rows(
        Parallel(_compile_encode(KINDS[dtype], group, layout == "bnb", keep), unit_nbytes),
        Parallel(_compile_decode(KINDS[dtype], group, layout == "bnb"), unit_nbytes),
        group,
        TILE,
    )
    return kernels._replace(rows=None) if layout == "bnb" else kernels


@inline
def _code(t: Any, bounds: Any) -> Any:
    """Count the bounds below `t`, by bisection without branches."""
    d = t > bounds[7]
    c = t > (bounds[11] if d else bounds[3])
    upper, lower = (bounds[13] if c else bounds[9]), (bounds[5] if c else bounds[1])
    b = t > (upper if d else lower)
    upper_upper, upper_lower = (bounds[14] if b else bounds[12]), (bounds[10] if b else bounds[8])
    lower_upper, lower_lower = (bounds[6] if b else bounds[4]), (bounds[2] if b else bounds[0])
    upper, lower = (upper_upper if c else upper_lower), (lower_upper if c else lower_lower)
    a = t > (upper if d else lower)
    high = u32((u32(8) if d else u32(0)) | (u32(4) if c else u32(0)))
    return np.uint8(u32(high | u32((u32(2) if b else u32(0)) | (u32(1) if a else u32(0)))))


@inline
def _code_above(t: Any, bounds: Any) -> Any:
    """Return the same as `_code` for a number above zero, except the code of zero."""
    c = t > bounds[11]
    b = t > (bounds[13] if c else bounds[9])
    upper, lower = (bounds[14] if b else bounds[12]), (bounds[10] if b else bounds[8])
    a = t > (upper if c else lower)
    high = u32(u32(8) | (u32(4) if c else u32(0)))
    return np.uint8(u32(high | u32((u32(2) if b else u32(0)) | (u32(1) if a else u32(0)))))


@inline
def _kept(code: Any, value: Any, keep: Any) -> Any:
    """Return the code of an element; where signs are kept, only zero has the code of zero."""
    if keep:
        word = as_u32(value)  # as floats, LLVM would take a denormal for a zero where the processor does
        above = max(code, np.uint8(ZERO + 1)) if np.int32(word) > np.int32(0) else code
        return min(code, np.uint8(ZERO - 1)) if word > u32(0x80000000) else above
    return code


@inline
def _value(code: Any) -> Any:
    """Return the value of a code, by selects without branches or a table."""
    a, b, c, d = (code & u32(1)) != 0, (code & u32(2)) != 0, (code & u32(4)) != 0, (code & u32(8)) != 0
    v0, v2 = (_V[1] if a else _V[0]), (_V[3] if a else _V[2])
    v4, v6 = (_V[5] if a else _V[4]), (_V[7] if a else _V[6])
    v8, v10 = (_V[9] if a else _V[8]), (_V[11] if a else _V[10])
    v12, v14 = (_V[13] if a else _V[12]), (_V[15] if a else _V[14])
    v0, v4 = (v2 if b else v0), (v6 if b else v4)
    v8, v12 = (v10 if b else v8), (v14 if b else v12)
    v0, v8 = (v4 if c else v0), (v12 if c else v8)
    return v8 if d else v0


@inline
def _as_f32_bits(top: Any, kind: Any) -> Any:
    """Convert a magnitude to bits of a float32; Inf or more where it is NaN or Inf."""
    return INF_F32 if kind == F16 and top >= INF_F16 else f32_magnitude(top, kind)


@inline
def _least(top: Any, keep: Any) -> Any:
    """Return the bits of the absmax of a group that is too small."""
    return u32(FLUSH >> 16) if keep and top != u32(0) else u32(0)


@inline
def _scale(top: Any, bnb: Any, keep: Any) -> Any:
    """Return the bits of the stored absmax, and the factor of the elements."""
    if bnb:
        absmax = u32(NAN) if top >= INF_F32 else top
        return absmax, f32(1) / as_f32(u32(max(top, u32(BNB_LEAST))))
    absmax = u32(min(u32(u32(top + u32(0xFFFF)) >> u32(16)), u32(LARGEST)))
    factor = f32(4) / as_f32(u32(max(u32(absmax << u32(16)), u32(FLUSH))))
    small = top < u32(FLUSH)
    absmax = u32(NAN >> 16) if top >= INF_F32 else _least(top, keep) if small else absmax
    return absmax, f32(0) if small else factor


@inline
def _find_tops(source: Any, tops: Any, group: Any, kind: Any, keep: Any) -> Any:
    """Find the largest magnitude of each group, NaN and Inf too; return whether all are finite without a sign bit.

    Without `keep` the caller does not need the result: it is False then.
    """
    nbytes = group * (4 if kind == F32 else 2)
    if keep:
        largest = u32(0)
        for index in range(TILE // group):
            top = u32(largest_of(source + index * nbytes, group, kind, True))
            largest = u32(max(largest, top))
            put(u32_at(tops), index, top)
        if largest < u32(INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16):
            return True
    for index in range(TILE // group):
        put(u32_at(tops), index, u32(largest_of(source + index * nbytes, group, kind, False)))
    return False


@inline
def _encode_tile(
    source: Any, packed: Any, absmaxes: Any, tops: Any, group: Any, kind: Any, bnb: Any, keep: Any, unsigned: Any
) -> None:
    factors, codes = _groups_stack(), codes_stack()
    largest = u32(0)
    for index in range(TILE // group):
        top = _as_f32_bits(u32(get(u32_at(tops), index)), kind)
        largest = u32(max(largest, top))
        put(u32_at(tops), index, top)
        absmax, factor = _scale(top, bnb, keep)
        put(u32_at(factors), index, as_u32(factor))
        if bnb:
            put(u32_at(absmaxes), index, absmax)
        else:
            put(u16_at(absmaxes), index, u16(absmax))
    if keep and unsigned:
        for index in range(TILE // group):
            factor = as_f32(u32(get(u32_at(factors), index)))
            for i in range(index * group, index * group + group):
                value = load(source, i, kind)
                code = _code_above(value * factor, _B1 if bnb else _B4)
                put(u8_at(codes), i, code if as_u32(value) != u32(0) else np.uint8(ZERO))
    else:
        for index in range(TILE // group):
            factor = as_f32(u32(get(u32_at(factors), index)))
            for i in range(index * group, index * group + group):
                value = load(source, i, kind)
                put(u8_at(codes), i, _kept(_code(value * factor, _B1 if bnb else _B4), value, keep))
    for i in range(TILE // 2):
        pair = get(u16_at(codes), i)
        first, second = (u16(pair >> u16(8)), u16(pair << u16(4))) if bnb else (pair, u16(pair >> u16(4)))
        put(u8_at(packed), i, np.uint8(u16(first | second)))
    if largest >= INF_F32:
        for index in range(TILE // group):
            if u32(get(u32_at(tops), index)) >= INF_F32:
                for i in range(index * group // 2, (index + 1) * group // 2):
                    put(u8_at(packed), i, ZEROS)


@inline
def _encode_short_bnb(source: Any, packed: Any, absmaxes: Any, start: Any, group: Any, kind: Any, keep: Any) -> None:
    """Encode a short last group as bitsandbytes does, which divides there."""
    top = u32(max(u32(get(u32_at(absmaxes), start // group)), u32(BNB_LEAST)))
    if top < INF_F32:
        put(u32_at(absmaxes), start // group, top)
        for i in range(start, start + group, 2):  # zeros follow the elements
            first, second = load(source, i, kind), load(source, i + 1, kind)
            high = _kept(_code(first / as_f32(top), _B1), first, keep)
            low = _kept(_code(second / as_f32(top), _B1), second, keep)
            put(u8_at(packed), i // 2, np.uint8(u32(low | u32(u32(high) << u32(4)))))


@inline
def _decode_tile(packed: Any, absmaxes: Any, target: Any, group: Any, kind: Any, bnb: Any) -> None:
    codes = codes_stack()
    for i in range(TILE // 2):
        pair = u16(get(u8_at(packed), i))
        first, second = (
            (u16(pair >> u16(4)), u16(pair & u16(15))) if bnb else (u16(pair & u16(15)), u16(pair >> u16(4)))
        )
        put(u16_at(codes), i, u16(first | u16(second << u16(8))))
    for index in range(TILE // group):
        bits = u32(get(u32_at(absmaxes), index)) if bnb else u32(u32(get(u16_at(absmaxes), index)) << u32(16))
        missing = bits > INF_F32
        absmax = f32(0) if bits < u32(FLUSH) else as_f32(bits)
        for i in range(index * group, index * group + group):
            store(target, i, _value(u32(get(u8_at(codes), i))) * absmax, missing, kind)


def _compile_encode(kind: int, group: int, bnb: bool, keep: bool) -> Any:
    itemsize, each = 4 if kind == F32 else 2, 4 if bnb else 2

    @kernel
    def encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        width = extra >> 24
        rows, row_nbytes = numel // width, (width + 1) // 2
        total = rows * ((width + group - 1) // group)
        absmaxes = payload + ((rows * row_nbytes + 15) & -16)
        tops, filled, apart, few = _groups_stack(), elements_stack(), _packed_stack(), _groups_stack()
        for tile in range(first, last):
            start = tile * (TILE // group)
            end = min(start + TILE // group, total)
            row, at, whole, _ = run_of(start, end, width, group)
            elements, packed, scales = source + (row * width + at) * itemsize, apart, few
            if whole == TILE:
                packed, scales = payload + row * row_nbytes + at // 2, absmaxes + start * each
            else:
                elements = filled
                clear(filled, itemsize * TILE)
                index = start
                while index < end:
                    row, at, count, passed = run_of(index, end, width, group)
                    copy(
                        source + (row * width + at) * itemsize,
                        filled + (index - start) * group * itemsize,
                        count * itemsize,
                    )
                    index += passed
            unsigned = _find_tops(elements, tops, group, kind, keep)
            _encode_tile(elements, packed, scales, tops, group, kind, bnb, keep, unsigned)
            if whole < TILE:
                if bnb and whole % group:
                    _encode_short_bnb(elements, packed, scales, whole // group * group, group, kind, keep)
                copy(scales, absmaxes + start * each, (end - start) * each)
                index = start
                while index < end:
                    row, at, count, passed = run_of(index, end, width, group)
                    codes = payload + row * row_nbytes + at // 2
                    copy(packed + (index - start) * group // 2, codes, (count + 1) // 2)
                    if count % 2 and rows > 1:
                        put(u8_at(codes), count // 2, np.uint8(get(u8_at(codes), count // 2) & np.uint8(15)))
                    index += passed
            if end == total:
                clear(payload + rows * row_nbytes, absmaxes - payload - rows * row_nbytes)

    return encode


def _compile_decode(kind: int, group: int, bnb: bool) -> Any:
    itemsize, each = 4 if kind == F32 else 2, 4 if bnb else 2

    @kernel
    def decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        width = extra >> 24
        rows, row_nbytes = numel // width, (width + 1) // 2
        total = rows * ((width + group - 1) // group)
        absmaxes = payload + ((rows * row_nbytes + 15) & -16)
        filled, apart, few = elements_stack(), _packed_stack(), _groups_stack()
        for tile in range(first, last):
            start = tile * (TILE // group)
            end = min(start + TILE // group, total)
            row, at, whole, _ = run_of(start, end, width, group)
            elements, packed, scales = filled, apart, few
            if whole == TILE:
                elements, packed = target + (row * width + at) * itemsize, payload + row * row_nbytes + at // 2
                scales = absmaxes + start * each
            else:
                index = start
                while index < end:
                    row, at, count, passed = run_of(index, end, width, group)
                    codes = payload + row * row_nbytes + at // 2
                    copy(codes, packed + (index - start) * group // 2, (count + 1) // 2)
                    index += passed
                copy(absmaxes + start * each, scales, (end - start) * each)
            _decode_tile(packed, scales, elements, group, kind, bnb)
            if whole < TILE:
                scatter(filled, target, start, end, width, group, kind)

    return decode
