"""int8 on the CPU. The bytes: csrc/int8.md."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

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
    f32,
    f32_magnitude,
    get,
    i8_at,
    in_units,
    inline,
    kernel,
    load,
    load_bits,
    load_magnitude,
    put,
    store,
    u8_at,
    u16,
    u16_at,
    u32,
)
from actstore.kernels.cpu.philox import noise_stack, offset, renew_noise
from actstore.kernels.cpu.rows import place_of, with_rows
from actstore.kernels.cpu.unsigned import LANES, put_codes

FLUSH = u32(0x08800000)  # 2^-110
LEAST_SCALE = u32(0x0500)  # 2^-117 as bfloat16: the scale of a group below 2^-110 where signs are kept
MAGIC = f32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer, ties to even, in the low bits
ZERO = 0x4B400000  # the bits of MAGIC

_u8, _i32 = np.uint8, np.int32


@cache
def kernels(dtype: torch.dtype, device: torch.device, group: int, round: str, keep: bool) -> Kernels:  # noqa: A002
    """Return the kernels for one dtype and set of options; compiled at first use, then read from numba's disk cache."""
    unit_nbytes = group * dtype.itemsize
    run_encode = Parallel(_compile_encode(KINDS[dtype], group, round != "nearest", keep), unit_nbytes)
    run_decode = Parallel(
        _compile_decode(KINDS[dtype], group, round == "dither", keep and round == "dither"), unit_nbytes
    )

    def compiled_rows() -> tuple[Parallel, Parallel]:
        noisy, dither = round != "nearest", round == "dither"
        return (
            Parallel(_compile_encode_rows(KINDS[dtype], group, noisy, keep), unit_nbytes),
            Parallel(_compile_decode_rows(KINDS[dtype], group, dither, keep and dither), unit_nbytes),
        )

    return with_rows(in_units(run_encode, run_decode, group), compiled_rows, group, group)


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
def _code(
    source: Any, i: Any, reciprocal: Any, noise: Any, kind: Any, noisy: Any, keep: Any, unsigned: Any = False
) -> Any:
    value = load(source, i, kind)
    steps = value * reciprocal
    if noisy:
        steps = steps + offset(noise, i)
    return code_of(value, steps, keep, unsigned)


@inline
def _top(source: Any, start: Any, count: Any, kind: Any, keep: Any) -> Any:
    """Find the largest magnitude, NaN and Inf included, and whether no sign bit is set (False unless `keep`)."""
    inf: Any = INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16
    top: Any = u32(0) if kind == F32 else u16(0)
    if keep:  # behind ReLU, half the work
        for i in range(start, start + count):
            bits = load_bits(source, i, kind)
            top = max(top, bits)
        if top < inf:
            return top, True
        top = u32(0) if kind == F32 else u16(0)
    for i in range(start, start + count):
        magnitude = load_magnitude(source, i, kind)
        top = max(top, magnitude)
    return top, False


@inline
def _encode_group(
    source: Any,
    codes: Any,
    scales: Any,
    noise: Any,
    index: Any,
    start: Any,
    count: Any,
    kind: Any,
    noisy: Any,
    keep: Any,
) -> None:
    inf: Any = INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16
    top, unsigned = _top(source, start, count, kind, keep)
    finite = top < inf
    if not finite:
        top = u32(0) if kind == F32 else u16(0)
        for i in range(start, start + count):
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
        whole = start + (count & -LANES)
        for i in range(start, whole, LANES):
            put_codes(source + i * itemsize, codes + i, reciprocal, noise + i, kind, noisy)
        for i in range(whole, start + count):
            put(u8_at(codes), i, _code(source, i, reciprocal, noise, kind, noisy, keep, True))
    elif finite:
        for i in range(start, start + count):
            put(u8_at(codes), i, _code(source, i, reciprocal, noise, kind, noisy, keep))
    else:
        for i in range(start, start + count):
            code = _code(source, i, reciprocal, noise, kind, noisy, keep)
            put(u8_at(codes), i, code if load_magnitude(source, i, kind) < inf else _u8(128))


@inline
def _decode_group(
    codes: Any,
    scales: Any,
    target: Any,
    noise: Any,
    index: Any,
    start: Any,
    count: Any,
    kind: Any,
    dither: Any,
    keep: Any,
) -> None:
    scale = as_f32(u32(u32(get(u16_at(scales), index)) << u32(16)))
    for i in range(start, start + count):
        code = get(i8_at(codes), i)
        steps = f32(code)
        if dither:
            steps = steps if keep and code == np.int8(0) else steps - offset(noise, i)
        store(target, i, steps * scale, code == np.int8(-128), kind)


def _compile_encode(kind: int, group: int, noisy: bool, keep: bool) -> Any:
    @kernel
    def encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        scales = payload + ((numel + 15) & -16)
        noise = noise_stack() if noisy else 0
        full = min(last, numel // group)
        for index in range(first, full):  # a constant count gives loops without remainder
            start = index * group
            drawn = renew_noise(noise, start, first * group, key) if noisy else 0
            _encode_group(source, payload, scales, drawn, index, start, group, kind, noisy, keep)
        if last > full:
            start = full * group
            drawn = renew_noise(noise, start, first * group, key) if noisy else 0
            _encode_group(source, payload, scales, drawn, full, start, numel - start, kind, noisy, keep)
        if last * group >= numel:
            for i in range(numel, scales - payload):
                put(u8_at(payload), i, _u8(0))

    return encode


def _compile_decode(kind: int, group: int, dither: bool, keep: bool) -> Any:
    @kernel
    def decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        scales = payload + ((numel + 15) & -16)
        noise = noise_stack() if dither else 0
        full = min(last, numel // group)
        for index in range(first, full):
            start = index * group
            drawn = renew_noise(noise, start, first * group, key) if dither else 0
            _decode_group(payload, scales, target, drawn, index, start, group, kind, dither, keep)
        if last > full:
            start = full * group
            drawn = renew_noise(noise, start, first * group, key) if dither else 0
            _decode_group(payload, scales, target, drawn, full, start, numel - start, kind, dither, keep)

    return decode


def _compile_encode_rows(kind: int, group: int, noisy: bool, keep: bool) -> Any:
    @kernel
    def encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        scales = payload + ((numel + 15) & -16)
        noise = noise_stack() if noisy else 0
        for index in range(first, last):
            row, start, count = place_of(index, extra, group)
            start += row * (extra >> 24)
            filled = index * group  # its place where rows are filled up to whole groups
            drawn = renew_noise(noise, filled, first * group, key) + filled - start if noisy else 0
            if count == group:
                _encode_group(source, payload, scales, drawn, index, start, group, kind, noisy, keep)
            else:
                _encode_group(source, payload, scales, drawn, index, start, count, kind, noisy, keep)
            if start + count == numel:
                for i in range(numel, scales - payload):
                    put(u8_at(payload), i, _u8(0))

    return encode


def _compile_decode_rows(kind: int, group: int, dither: bool, keep: bool) -> Any:
    @kernel
    def decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        scales = payload + ((numel + 15) & -16)
        noise = noise_stack() if dither else 0
        for index in range(first, last):
            row, start, count = place_of(index, extra, group)
            start += row * (extra >> 24)
            filled = index * group
            drawn = renew_noise(noise, filled, first * group, key) + filled - start if dither else 0
            if count == group:
                _decode_group(payload, scales, target, drawn, index, start, group, kind, dither, keep)
            else:
                _decode_group(payload, scales, target, drawn, index, start, count, kind, dither, keep)

    return decode
