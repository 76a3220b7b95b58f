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
    load_magnitude,
    put,
    store,
    u8_at,
    u16,
    u16_at,
    u32,
)
from actstore.kernels.cpu.philox import noise_stack, offset, renew_noise

FLUSH = u32(0x08800000)  # 2^-110
MAGIC = f32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer, ties to even, in the low bits


@cache
def kernels(dtype: torch.dtype, device: torch.device, group: int, round: str) -> Kernels:  # noqa: A002
    """Kernels for one dtype and set of options; compiled at first use, then read from numba's cache on disk."""
    unit_nbytes = group * dtype.itemsize
    run_encode = Parallel(_compile_encode(KINDS[dtype], group, round != "nearest"), unit_nbytes)
    run_decode = Parallel(_compile_decode(KINDS[dtype], group, round == "dither"), unit_nbytes)
    return in_units(run_encode, run_decode, group)


@inline
def _code(source: Any, i: Any, reciprocal: Any, noise: Any, kind: Any, noisy: Any) -> Any:
    steps = load(source, i, kind) * reciprocal
    if noisy:
        steps = steps + offset(noise, i)
    return np.uint8(as_u32(steps + MAGIC))


@inline
def _encode_group(
    source: Any, codes: Any, scales: Any, noise: Any, index: Any, start: Any, count: Any, kind: Any, noisy: Any
) -> None:
    inf: Any = INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16
    top: Any = u32(0) if kind == F32 else u16(0)
    for i in range(start, start + count):
        magnitude = load_magnitude(source, i, kind)
        top = max(top, magnitude)
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
    put(u16_at(scales), index, u16(scale))

    if finite:
        for i in range(start, start + count):
            put(u8_at(codes), i, _code(source, i, reciprocal, noise, kind, noisy))
    else:
        for i in range(start, start + count):
            code = _code(source, i, reciprocal, noise, kind, noisy)
            put(u8_at(codes), i, code if load_magnitude(source, i, kind) < inf else np.uint8(128))


@inline
def _decode_group(
    codes: Any, scales: Any, target: Any, noise: Any, index: Any, start: Any, count: Any, kind: Any, dither: Any
) -> None:
    scale = as_f32(u32(u32(get(u16_at(scales), index)) << u32(16)))
    for i in range(start, start + count):
        code = get(i8_at(codes), i)
        steps = f32(code)
        if dither:
            steps = steps - offset(noise, i)
        store(target, i, steps * scale, code == np.int8(-128), kind)


def _compile_encode(kind: int, group: int, noisy: bool) -> Any:
    @kernel
    def encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        scales = payload + ((numel + 15) & -16)
        noise = noise_stack() if noisy else 0
        full = min(last, numel // group)
        for index in range(first, full):  # a constant count gives loops without remainder
            start = index * group
            drawn = renew_noise(noise, start, first * group, key) if noisy else 0
            _encode_group(source, payload, scales, drawn, index, start, group, kind, noisy)
        if last > full:
            start = full * group
            drawn = renew_noise(noise, start, first * group, key) if noisy else 0
            _encode_group(source, payload, scales, drawn, full, start, numel - start, kind, noisy)
        if last * group >= numel:
            for i in range(numel, scales - payload):
                put(u8_at(payload), i, np.uint8(0))

    return encode


def _compile_decode(kind: int, group: int, dither: bool) -> Any:
    @kernel
    def decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        scales = payload + ((numel + 15) & -16)
        noise = noise_stack() if dither else 0
        full = min(last, numel // group)
        for index in range(first, full):
            start = index * group
            drawn = renew_noise(noise, start, first * group, key) if dither else 0
            _decode_group(payload, scales, target, drawn, index, start, group, kind, dither)
        if last > full:
            start = full * group
            drawn = renew_noise(noise, start, first * group, key) if dither else 0
            _decode_group(payload, scales, target, drawn, full, start, numel - start, kind, dither)

    return decode
