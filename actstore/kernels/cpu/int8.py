"""int8 on the CPU. The bytes: csrc/int8.md."""

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
    i8_at,
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
from actstore.kernels.cpu.philox import noise_of, noise_stack, offset
from actstore.kernels.cpu.rows import clear, codes_stack, copy, copy_filled, elements_stack, in_rows, row_of
from actstore.kernels.cpu.unsigned import LANES, put_codes

FLUSH = u32(0x08800000)  # 2^-110
LEAST_SCALE = u32(0x0500)  # 2^-117 as bfloat16: the scale of a group below 2^-110 where signs are kept
MAGIC = f32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer, ties to even, in the low bits
ZERO = 0x4B400000  # the bits of MAGIC

_u8, _i32 = np.uint8, np.int32


@cache
def kernels(dtype: torch.dtype, device: torch.device, group: int, round: str, keep: bool) -> Kernels:  # noqa: A002
    """Return the kernels for one dtype and set of options; compiled at first use, then read from numba's disk cache."""
    noisy, dither, unit_nbytes = round != "nearest", round == "dither", group * dtype.itemsize
    return in_rows(
        Parallel(_compile_encode(KINDS[dtype], group, noisy, keep), unit_nbytes),
        Parallel(_compile_decode(KINDS[dtype], group, dither, keep and dither), unit_nbytes),
        group,
        group,
    )


@inline
def code_of(value: Any, steps: Any, keep: Any, unsigned: Any) -> Any:
    """Round `steps` to the code of a value; where signs are kept, to 1 or -1 instead of a 0 that would lose the sign.

    `unsigned` says that no value has its sign bit set, not even a zero. The code compares bits as integers in a way
    that LLVM does not take for a comparison of floats: for floats, denormals can be zeros.
    """
    rounded = as_u32(steps + MAGIC)
    bits = as_u32(value)
    if unsigned:
        return max(_u8(rounded), _u8(1)) if bits != u32(0) else _u8(0)
    if keep:
        up, down = max(_i32(rounded), _i32(ZERO + 1)), min(_i32(rounded), _i32(ZERO - 1))
        moved = up if _i32(bits) > _i32(0) else _i32(rounded)
        return _u8(down if bits > u32(0x80000000) else moved)
    return _u8(rounded)


@inline
def _code(source: Any, i: Any, reciprocal: Any, noise: Any, kind: Any, noisy: Any, keep: Any) -> Any:
    value = load(source, i, kind)
    steps = value * reciprocal
    if noisy:
        steps = steps + offset(noise, i)
    return code_of(value, steps, keep, False)


@inline
def _encode_group(
    source: Any,
    codes: Any,
    scales: Any,
    noise: Any,
    index: Any,
    group: Any,
    count: Any,
    kind: Any,
    noisy: Any,
    keep: Any,
) -> None:
    inf: Any = INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16
    top = largest_of(source, group, kind, keep)
    unsigned = keep and top < inf  # after ReLU
    if keep and not unsigned:
        top = largest_of(source, group, kind, False)
    finite = top < inf
    if not finite:
        top = u32(0) if kind == F32 else u16(0)
        for i in range(count):
            magnitude = load_magnitude(source, i, kind)
            top = magnitude if top < magnitude < inf else top

    bits = f32_magnitude(top, kind)
    scale, reciprocal = u32(0), f32(0)
    if bits >= FLUSH:
        scale = u32(u32(as_u32(as_f32(bits) / f32(127)) + u32(0xFFFF)) >> u32(16))
        reciprocal = f32(1) / as_f32(u32(scale << u32(16)))
    elif keep:
        scale = LEAST_SCALE if bits != u32(0) else u32(0)
    put(u16_at(scales), index, u16(scale))

    if keep and unsigned:
        itemsize = 4 if kind == F32 else 2
        for i in range(0, count, LANES):
            put_codes(source + i * itemsize, codes + i, reciprocal, noise + i, kind, noisy)
    elif finite:
        for i in range(count):
            put(u8_at(codes), i, _code(source, i, reciprocal, noise, kind, noisy, keep))
    else:
        for i in range(count):
            code = _code(source, i, reciprocal, noise, kind, noisy, keep)
            put(u8_at(codes), i, code if load_magnitude(source, i, kind) < inf else _u8(128))


@inline
def _decode_group(
    codes: Any,
    scales: Any,
    target: Any,
    noise: Any,
    index: Any,
    count: Any,
    kind: Any,
    dither: Any,
    keep: Any,
) -> None:
    scale = as_f32(u32(u32(get(u16_at(scales), index)) << u32(16)))
    for i in range(count):
        code = get(i8_at(codes), i)
        steps = f32(code)
        if dither:
            steps = steps if keep and code == np.int8(0) else steps - offset(noise, i)
        store(target, i, steps * scale, code == np.int8(-128), kind)


def _compile_encode(kind: int, group: int, noisy: bool, keep: bool) -> Any:
    itemsize = 4 if kind == F32 else 2

    @kernel
    def encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        scales = payload + ((numel + 15) & -16)
        noise = noise_stack() if noisy else 0
        filled, short = elements_stack(), codes_stack()
        width = extra >> 24
        row, part = row_of(first, width, group)
        whole = group if group > LANES else group + (numel >> 62)  # LLVM would unroll 32 steps to scalar instructions
        for index in range(first, last):
            start, count = row * width + part, min(group, width - part)
            drawn = noise_of(noise, index, first, group, key) if noisy else 0
            elements, codes = source + start * itemsize, payload + start
            if count < group:
                copy_filled(elements, filled, count, group, kind)
                elements, codes = filled, short
            _encode_group(elements, codes, scales, drawn, index, group, whole, kind, noisy, keep)
            if count < group:
                copy(short, payload + start, count)
            row, part = (row, part + group) if part + group < width else (row + 1, 0)
        if row * width == numel:
            clear(payload + numel, scales - payload - numel)

    return encode


def _compile_decode(kind: int, group: int, dither: bool, keep: bool) -> Any:
    itemsize = 4 if kind == F32 else 2

    @kernel
    def decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        scales = payload + ((numel + 15) & -16)
        noise = noise_stack() if dither else 0
        filled, short = elements_stack(), codes_stack()
        width = extra >> 24
        row, part = row_of(first, width, group)
        for index in range(first, last):
            start, count = row * width + part, min(group, width - part)
            drawn = noise_of(noise, index, first, group, key) if dither else 0
            elements, codes = target + start * itemsize, payload + start
            if count < group:
                copy(codes, short, count)
                elements, codes = filled, short
            _decode_group(codes, scales, elements, drawn, index, group, kind, dither, keep)
            if count < group:
                copy(filled, target + start * itemsize, count * itemsize)
            row, part = (row, part + group) if part + group < width else (row + 1, 0)

    return decode
