"""fp8 on the CPU. The bytes: csrc/fp8.md."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from actstore.kernels.base import Kernels
from actstore.kernels.cpu.groups import largest_of
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
    inline,
    kernel,
    load,
    load_magnitude,
    put,
    store,
    u8_at,
    u16,
    u16_at,
    u32,
)
from actstore.kernels.cpu.philox import noise_of, noise_stack
from actstore.kernels.cpu.rows import clear, codes_stack, copy, copy_filled, elements_stack, in_rows, row_of

FLUSH = u32(0x0E800000)  # 2^-98
LEAST_NORMAL = u32(0x3C800000)  # 2^-6, the least normal e4m3
LEAST_SCALE = u32(0x0A000000)  # 2^-107, of a group below 2^-98 where signs are kept

_u8, _i32 = np.uint8, np.int32


@cache
def kernels(dtype: torch.dtype, device: torch.device, group: int, scale: str, round: str, keep: bool) -> Kernels:  # noqa: A002
    """Return the kernels for one dtype and set of options; compiled at first use, then read from numba's disk cache."""
    unit_nbytes = group * dtype.itemsize
    return in_rows(
        Parallel(_compile_encode(KINDS[dtype], group, round != "nearest", keep), unit_nbytes),
        Parallel(_compile_decode(KINDS[dtype], group), unit_nbytes),
        group,
        group,
        0xFFFF if scale == "linear" else 0x7FFFFF,
    )


@inline
def _code(
    source: Any, i: Any, reciprocal: Any, noise: Any, kind: Any, noisy: Any, keep: Any, unsigned: Any = False
) -> Any:
    """Return the code of a finite element. `unsigned` says that no element has its sign bit set, not even a zero.

    The code compares bits as integers in a way that LLVM does not take for a comparison of floats: for floats,
    denormals can be zeros.
    """
    value = load(source, i, kind)
    bits = as_u32(value * reciprocal)
    magnitude = bits if unsigned else u32(bits & u32(0x7FFFFFFF))
    power = u32(max(u32(magnitude & u32(0x7F800000)), LEAST_NORMAL))
    base = u32(power + u32((4 if noisy else 20) << 23))
    steps = u32(as_u32(as_f32(magnitude) + as_f32(base)) - base)
    if noisy:
        random = u32(u32(u32(get(u8_at(noise), i)) << u32(8)) | u32(0x80))
        steps = u32(u32(steps + random) >> u32(16))
    code = u32(min(u32(steps + u32(u32(power - LEAST_NORMAL) >> u32(20))), u32(0x7E)))
    if unsigned:
        return max(_u8(code), _u8(1)) if as_u32(value) != u32(0) else _u8(0)
    if keep:
        bits = as_u32(value)
    signed = _u8(u32(code | u32(u32(bits >> u32(24)) & u32(0x80))))
    if keep:
        above = max(signed, _u8(1)) if _i32(bits) > _i32(0) else signed
        return max(signed, _u8(0x81)) if bits > u32(0x80000000) else above
    return signed


@inline
def _top(source: Any, count: Any, below: Any, kind: Any) -> Any:
    """Find the largest magnitude less than `below`, as bits of its own width."""
    top: Any = u32(0) if kind == F32 else u16(0)
    for i in range(count):
        magnitude = load_magnitude(source, i, kind)
        top = magnitude if top < magnitude < below else top
    return top


@inline
def _encode_group(
    source: Any,
    codes: Any,
    scales: Any,
    noise: Any,
    below: Any,
    index: Any,
    count: Any,
    kind: Any,
    noisy: Any,
    keep: Any,
) -> None:
    inf: Any = INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16
    top = largest_of(source, count, kind, keep)
    unsigned = keep and top < inf  # after ReLU
    if keep and not unsigned:
        top = largest_of(source, count, kind, False)
    finite = top < inf
    if not finite:
        top = _top(source, count, inf, kind)
    bits = f32_magnitude(top, kind)
    scale, reciprocal = u32(0), f32(0)
    if bits >= FLUSH:
        scale = u32(u32(as_u32(as_f32(bits) / f32(448)) + below) & u32(~below))
        reciprocal = f32(1) / as_f32(scale)
    elif keep:
        scale = LEAST_SCALE if bits != u32(0) else u32(0)
    put(u16_at(scales), index, u16(scale >> u32(16)))

    if keep and unsigned:
        for i in range(count):
            put(u8_at(codes), i, _code(source, i, reciprocal, noise, kind, noisy, keep, True))
    elif finite:
        for i in range(count):
            put(u8_at(codes), i, _code(source, i, reciprocal, noise, kind, noisy, keep))
    else:
        for i in range(count):
            code = _code(source, i, reciprocal, noise, kind, noisy, keep)
            put(u8_at(codes), i, code if load_magnitude(source, i, kind) < inf else _u8(0x7F))


@inline
def _decode_group(codes: Any, scales: Any, target: Any, index: Any, count: Any, kind: Any) -> None:
    scale = as_f32(u32(u32(get(u16_at(scales), index)) << u32(16)))
    for i in range(count):
        code = u32(get(u8_at(codes), i))
        moved = u32(u32(code & u32(0x7F)) << u32(20))
        small = moved < u32(0x00800000)
        bias = LEAST_NORMAL if small else u32(120 << 23)
        excess = f32(2.0**-6) if small else f32(0)
        magnitude = as_u32(as_f32(u32(moved + bias)) - excess)
        value = as_f32(u32(magnitude | u32(u32(code & u32(0x80)) << u32(24))))
        store(target, i, value * scale, moved == u32(0x7F << 20), kind)


def _compile_encode(kind: int, group: int, noisy: bool, keep: bool) -> Any:
    itemsize = 4 if kind == F32 else 2

    @kernel
    def encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        scales = payload + ((numel + 15) & -16)
        noise = noise_stack() if noisy else 0
        filled, short = elements_stack(), codes_stack()
        width, below = extra >> 24, u32(extra & 0xFFFFFF)
        row, part = row_of(first, width, group)
        for index in range(first, last):
            start, count = row * width + part, min(group, width - part)
            drawn = noise_of(noise, index, first, group, key) if noisy else 0
            elements, codes = source + start * itemsize, payload + start
            if count < group:
                copy_filled(elements, filled, count, group, kind)
                elements, codes = filled, short
            _encode_group(elements, codes, scales, drawn, below, index, group, kind, noisy, keep)
            if count < group:
                copy(short, payload + start, count)
            row, part = (row, part + group) if part + group < width else (row + 1, 0)
        if row * width == numel:
            clear(payload + numel, scales - payload - numel)

    return encode


def _compile_decode(kind: int, group: int) -> Any:
    itemsize = 4 if kind == F32 else 2

    @kernel
    def decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        scales = payload + ((numel + 15) & -16)
        filled, short = elements_stack(), codes_stack()
        width = extra >> 24
        row, part = row_of(first, width, group)
        for index in range(first, last):
            start, count = row * width + part, min(group, width - part)
            elements, codes = target + start * itemsize, payload + start
            if count < group:
                copy(codes, short, count)
                elements, codes = filled, short
            _decode_group(codes, scales, elements, index, group, kind)
            if count < group:
                copy(filled, target + start * itemsize, count * itemsize)
            row, part = (row, part + group) if part + group < width else (row + 1, 0)

    return decode
