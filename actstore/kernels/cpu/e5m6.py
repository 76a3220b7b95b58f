"""e5m6 on the CPU. The bytes: csrc/e5m6.md."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from actstore.kernels.base import Kernels
from actstore.kernels.cpu.language import (
    BF16,
    F16,
    F32,
    INF_F16,
    INF_F32,
    KINDS,
    Parallel,
    as_f32,
    as_u32,
    f16_to_f32,
    get,
    in_units,
    inline,
    kernel,
    load,
    load_bits,
    put,
    u8_at,
    u16,
    u16_at,
    u32,
    u32_at,
)

BLOCK = 512  # elements in a unit of work
LEAST_NORMAL = u32(0x38800000)  # 2^-14, the least normal e5m6
OVERFLOW = u32(0x47800000)  # 2^16: the code of Inf follows that of 65024


@cache
def kernels(dtype: torch.dtype, device: torch.device, keep: bool) -> Kernels:
    """Return the kernels for one dtype; compiled at first use, then read from numba's disk cache."""
    unit_nbytes = BLOCK * dtype.itemsize
    run_encode = Parallel(_compile_encode(KINDS[dtype], keep), unit_nbytes)
    run_decode = Parallel(_compile_decode(KINDS[dtype]), unit_nbytes)
    return in_units(run_encode, run_decode, BLOCK)


@inline
def _code_of_f16(half: Any, keep: Any, unsigned: Any) -> Any:
    magnitude = half if unsigned else u16(half & u16(0x7FFF))
    odd = u16(u16(magnitude >> u16(4)) & u16(1))
    rounded = u16(u16(u16(magnitude + u16(7)) + odd) >> u16(4))
    if unsigned:
        return max(rounded, u16(1)) if half != u16(0) else u16(0)
    if keep:
        rounded = max(rounded, u16(min(magnitude, u16(1))))
    code = u16(rounded | u16(u16(half >> u16(4)) & u16(0x800)))
    return u16(0x7E0) if magnitude > u16(0x7C00) else code


@inline
def _code_of_f32(bits: Any, keep: Any, unsigned: Any) -> Any:
    magnitude = bits if unsigned else u32(bits & u32(0x7FFFFFFF))
    near = magnitude if unsigned else u32(min(magnitude, OVERFLOW))
    power = u32(max(u32(near & u32(0x7F800000)), LEAST_NORMAL))
    base = u32(power + u32(17 << 23))
    steps = u32(as_u32(as_f32(near) + as_f32(base)) - base)
    rounded = u32(steps + u32(u32(power - LEAST_NORMAL) >> u32(17)))
    if unsigned:
        return u16(max(rounded, u32(1)) if bits != u32(0) else u32(0))
    if keep:
        rounded = max(rounded, u32(min(magnitude, u32(1))))
    code = u32(rounded | u32(u32(bits >> u32(20)) & u32(0x800)))
    return u16(u32(0x7E0) if magnitude > INF_F32 else code)


@inline
def _code(source: Any, i: Any, kind: Any, keep: Any, unsigned: Any = False) -> Any:
    """Return the code of an element. `unsigned` says that it is below 2^16 with a clear sign bit."""
    if kind == F16:
        return _code_of_f16(u16(get(u16_at(source), i)), keep, unsigned)
    return _code_of_f32(as_u32(load(source, i, kind)), keep, unsigned)


@inline
def _put_value(target: Any, i: Any, code: Any, kind: Any) -> None:
    magnitude = u16(code & u16(0x7FF))
    if kind == F16:
        put(u16_at(target), i, u16(0x7E00) if magnitude > u16(0x7C0) else u16(code << u16(4)))
        return
    bits = as_u32(f16_to_f32(u32(u32(code) << u32(4))))  # twice 2^15 in place of Inf
    bits = u32(bits + u32(0x38000000)) if magnitude == u16(0x7C0) else bits
    bits = u32(0x7FC00000) if magnitude > u16(0x7C0) else bits
    if kind == F32:
        put(u32_at(target), i, bits)
    elif kind == BF16:
        put(u16_at(target), i, u16(bits >> u32(16)))


@inline
def _is_unsigned(source: Any, start: Any, kind: Any) -> Any:
    """Return whether no element of a block has its sign bit set, and all are below 2^16, as after ReLU."""
    top: Any = u32(0) if kind == F32 else u16(0)
    for i in range(start, start + BLOCK):
        bits = load_bits(source, i, kind)
        top = max(top, bits)
    return top < (OVERFLOW if kind == F32 else INF_F16 if kind == F16 else u16(OVERFLOW >> u32(16)))


@inline
def _encode_pairs(
    source: Any, high: Any, low: Any, first: Any, last: Any, kind: Any, keep: Any, unsigned: Any = False
) -> None:
    for j in range(first, last):
        one, other = _code(source, 2 * j, kind, keep, unsigned), _code(source, 2 * j + 1, kind, keep, unsigned)
        put(u8_at(high), 2 * j, np.uint8(one >> u16(4)))
        put(u8_at(high), 2 * j + 1, np.uint8(other >> u16(4)))
        put(u8_at(low), j, np.uint8(u16(one & u16(15)) | u16(u16(other & u16(15)) << u16(4))))


@inline
def _decode_pairs(high: Any, low: Any, target: Any, first: Any, last: Any, kind: Any) -> None:
    for j in range(first, last):
        both = u16(get(u8_at(low), j))
        one, other = u16(get(u8_at(high), 2 * j)), u16(get(u8_at(high), 2 * j + 1))
        _put_value(target, 2 * j, u16(u16(one << u16(4)) | u16(both & u16(15))), kind)
        _put_value(target, 2 * j + 1, u16(u16(other << u16(4)) | u16(both >> u16(4))), kind)


def _compile_encode(kind: int, keep: bool) -> Any:
    @kernel
    def encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        low = payload + ((numel + 15) & -16)
        full = min(last, numel // BLOCK)
        for block in range(first, full):
            start = block * (BLOCK // 2)
            if keep and _is_unsigned(source, block * BLOCK, kind):
                _encode_pairs(source, payload, low, start, start + BLOCK // 2, kind, keep, True)
            else:
                _encode_pairs(source, payload, low, start, start + BLOCK // 2, kind, keep)
        if last > full:
            _encode_pairs(source, payload, low, full * (BLOCK // 2), numel // 2, kind, keep)
            if numel % 2:
                code = _code(source, numel - 1, kind, keep)
                put(u8_at(payload), numel - 1, np.uint8(code >> u16(4)))
                put(u8_at(low), numel // 2, np.uint8(code & u16(15)))
            for i in range(numel, low - payload):
                put(u8_at(payload), i, np.uint8(0))

    return encode


def _compile_decode(kind: int) -> Any:
    @kernel
    def decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        low = payload + ((numel + 15) & -16)
        full = min(last, numel // BLOCK)
        for block in range(first, full):
            start = block * (BLOCK // 2)
            _decode_pairs(payload, low, target, start, start + BLOCK // 2, kind)
        if last > full:
            _decode_pairs(payload, low, target, full * (BLOCK // 2), numel // 2, kind)
            if numel % 2:
                high, rest = u16(get(u8_at(payload), numel - 1)), u16(get(u8_at(low), numel // 2))
                _put_value(target, numel - 1, u16(u16(high << u16(4)) | u16(rest & u16(15))), kind)

    return decode
