"""int8 on the CPU. The bytes: csrc/int8.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from actstore.kernels.base import Kernels, payload_pointer
from actstore.kernels.cpu import (
    BF16,
    F32,
    INF_BF16,
    INF_F16,
    INF_F32,
    KINDS,
    as_f32,
    as_u32,
    f16_to_f32,
    f32,
    get,
    i8_at,
    inline,
    kernel,
    load,
    load_magnitude,
    put,
    store,
    team,
    u8_at,
    u16,
    u16_at,
    u32,
)
from actstore.kernels.threads import SPLIT_NBYTES, TEAM_NBYTES, split, split_in_team

FLUSH = u32(0x08800000)  # 2^-110
MAGIC = f32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer, ties to even, in the low bits


@cache
def kernels(dtype: torch.dtype, device: torch.device, group: int) -> Kernels:
    """Kernels for one dtype and group size; compiled at first use, then read from numba's cache on disk."""
    run_encode, run_decode = _compile_encode(KINDS[dtype], group), _compile_decode(KINDS[dtype], group)
    encode_range, decode_range = _on_threads(run_encode, dtype), _on_threads(run_decode, dtype)
    small = TEAM_NBYTES // dtype.itemsize

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int) -> None:
        if numel < small:
            run_encode(src.data_ptr(), payload_pointer(out), numel, 0, -(-numel // group))
        else:
            encode_range((src.data_ptr(), payload_pointer(out), numel), -(-numel // group))

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int) -> None:
        if numel < small:
            run_decode(payload_pointer(buf), out.data_ptr(), numel, 0, -(-numel // group))
        else:
            decode_range((payload_pointer(buf), out.data_ptr(), numel), -(-numel // group))

    return Kernels(encode, decode, dtype.itemsize)


def _on_threads(run: Any, dtype: torch.dtype) -> Callable[[tuple[int, int, int], int], None]:
    """Run a kernel on all groups of a large tensor: on torch's threads, else on our own where that pays."""
    large = SPLIT_NBYTES // dtype.itemsize
    work: list[Any] = []  # compiled at first use

    def run_all(args: tuple[int, int, int], groups: int) -> None:
        if not work:
            work.append(team(run))
        if split_in_team(work[0].address, args, groups):
            return
        if args[2] < large:
            run(*args, 0, groups)
        else:
            split(run, args, groups)

    return run_all


@inline
def _encode_group(source: Any, codes: Any, scales: Any, index: Any, start: Any, count: Any, kind: Any) -> None:
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

    if kind == F32:
        bits = top
    elif kind == BF16:
        bits = u32(u32(top) << u32(16))
    else:
        bits = as_u32(f16_to_f32(u32(top)))
    scale, reciprocal = u32(0), f32(0)
    if bits >= FLUSH:
        scale = u32(u32(as_u32(as_f32(bits) / f32(127)) + u32(0xFFFF)) >> u32(16))
        reciprocal = f32(1) / as_f32(u32(scale << u32(16)))
    put(u16_at(scales), index, u16(scale))

    if finite:
        for i in range(start, start + count):
            put(u8_at(codes), i, np.uint8(as_u32(load(source, i, kind) * reciprocal + MAGIC)))
    else:
        for i in range(start, start + count):
            code = np.uint8(as_u32(load(source, i, kind) * reciprocal + MAGIC))
            put(u8_at(codes), i, code if load_magnitude(source, i, kind) < inf else np.uint8(128))


@inline
def _decode_group(codes: Any, scales: Any, target: Any, index: Any, start: Any, count: Any, kind: Any) -> None:
    scale = as_f32(u32(u32(get(u16_at(scales), index)) << u32(16)))
    for i in range(start, start + count):
        code = get(i8_at(codes), i)
        store(target, i, f32(code) * scale, code == np.int8(-128), kind)


def _compile_encode(kind: int, group: int) -> Any:
    @kernel
    def encode(source: int, payload: int, numel: int, first: int, last: int) -> None:
        scales = payload + ((numel + 15) & -16)
        full = min(last, numel // group)
        for index in range(first, full):  # a constant count gives loops without remainder
            _encode_group(source, payload, scales, index, index * group, group, kind)
        if last > full:
            _encode_group(source, payload, scales, full, full * group, numel - full * group, kind)
        if last * group >= numel:
            for i in range(numel, scales - payload):
                put(u8_at(payload), i, np.uint8(0))

    return encode


def _compile_decode(kind: int, group: int) -> Any:
    @kernel
    def decode(payload: int, target: int, numel: int, first: int, last: int) -> None:
        scales = payload + ((numel + 15) & -16)
        full = min(last, numel // group)
        for index in range(first, full):
            _decode_group(payload, scales, target, index, index * group, group, kind)
        if last > full:
            _decode_group(payload, scales, target, full, full * group, numel - full * group, kind)

    return decode
