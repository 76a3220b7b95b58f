"""hadamard128 on the CPU. The bytes: csrc/hadamard128.md."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from actstore.kernels.base import Inner, Kernels
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
    get,
    inline,
    intrinsic,
    kernel,
    llvm,
    load,
    load_magnitude,
    put,
    stack_of,
    store,
    types,
    u16,
    u32,
    u32_at,
)
from actstore.kernels.cpu.philox import philox
from actstore.kernels.hadamard128 import ROTATION_NUMEL, around

TINY = u32(0x0F800000)  # 2^-96
FACTOR = u32(0x3DB504F3)  # 2^-3.5
values_stack: Any = stack_of(4 * ROTATION_NUMEL)
factors_stack: Any = stack_of(4 * ROTATION_NUMEL)


def kernels(dtype: torch.dtype, device: torch.device, inner: Inner) -> Kernels:
    """Return the kernels for one dtype, around those of the inner codec."""
    run_forward, run_inverse = _rotations(dtype)

    def forward(src: torch.Tensor, scratch: torch.Tensor, numel: int, key: int) -> None:
        run_forward(src.data_ptr(), scratch.data_ptr(), numel, key, 0, -(-numel // ROTATION_NUMEL))

    def inverse(scratch: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        run_inverse(scratch.data_ptr(), out.data_ptr(), numel, key, 0, -(-numel // ROTATION_NUMEL))

    return around(inner.kernels("cpu", torch.float32, device), device, forward, inverse)


@cache
def _rotations(dtype: torch.dtype) -> tuple[Any, Any]:
    nbytes = ROTATION_NUMEL * torch.float32.itemsize
    return Parallel(_compile_forward(KINDS[dtype]), nbytes), Parallel(_compile_inverse(KINDS[dtype]), nbytes)


@intrinsic
def _butterflies(_typing: Any, _address: Any) -> Any:
    """Transform 128 float32 in place.

    Each of the seven stages adds and subtracts the two halves and interleaves sums with differences, so that elements
    64, 32, ... 1 apart meet; after seven interleavings all are in their places.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        def lanes(first: int, step: int = 1) -> Any:
            indices = [first + step * i for i in range(ROTATION_NUMEL // 2)]
            return llvm.Constant(llvm.VectorType(llvm.IntType(32), ROTATION_NUMEL // 2), indices)

        mixed = [i // 2 + ROTATION_NUMEL // 2 * (i % 2) for i in range(ROTATION_NUMEL)]
        interleaved = llvm.Constant(llvm.VectorType(llvm.IntType(32), ROTATION_NUMEL), mixed)
        pointer = builder.inttoptr(args[0], llvm.VectorType(llvm.FloatType(), ROTATION_NUMEL).as_pointer())
        vector = builder.load(pointer, align=64)
        for _ in range(ROTATION_NUMEL.bit_length() - 1):
            low = builder.shuffle_vector(vector, vector, lanes(0))
            high = builder.shuffle_vector(vector, vector, lanes(ROTATION_NUMEL // 2))
            vector = builder.shuffle_vector(builder.fadd(low, high), builder.fsub(low, high), interleaved)
        builder.store(vector, pointer, align=64)
        return _context.get_dummy_value()

    return types.none(types.int64), generate


@inline
def _draw_factors(factors: Any, key: Any, plain: Any) -> None:
    """Store 128 random signs, each over the magnitude bits `plain`: those of 2^-3.5, or 0 for the signs alone."""
    for word in range(4):
        bits = philox(0, 1, key)[word]
        for i in range(32):
            sign = u32(u32(u32(bits >> u32(i)) & u32(1)) << u32(31))
            put(u32_at(factors), 32 * word + i, u32(plain | sign))


@inline
def _scaled(value: Any, factor: Any) -> Any:
    """Return the bits of a product, zero for a tiny value."""
    tiny = u32(as_u32(value) & u32(0x7FFFFFFF)) < TINY
    return as_u32((f32(0) if tiny else value) * as_f32(factor))


@inline
def _finite(values: Any) -> Any:
    top = u32(0)
    for i in range(ROTATION_NUMEL):
        top = max(top, u32(get(u32_at(values), i) & u32(0x7FFFFFFF)))
    return top < INF_F32


def _compile_forward(kind: int) -> Any:
    @kernel
    def forward(source: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        inf: Any = INF_F32 if kind == F32 else INF_BF16 if kind == BF16 else INF_F16
        values, factors = values_stack(), factors_stack()
        _draw_factors(factors, key, FACTOR)
        for group in range(first, last):
            start = group * ROTATION_NUMEL
            top: Any = u32(0) if kind == F32 else u16(0)
            if start + ROTATION_NUMEL <= numel:
                for i in range(ROTATION_NUMEL):
                    top = max(top, load_magnitude(source, start + i, kind))
                    put(u32_at(values), i, _scaled(load(source, start + i, kind), get(u32_at(factors), i)))
            else:
                for i in range(ROTATION_NUMEL):
                    put(u32_at(values), i, u32(0))
                for i in range(numel - start):
                    top = max(top, load_magnitude(source, start + i, kind))
                    put(u32_at(values), i, _scaled(load(source, start + i, kind), get(u32_at(factors), i)))
            _butterflies(values)
            finite = top < inf and _finite(values)
            for i in range(ROTATION_NUMEL):
                put(u32_at(target), start + i, get(u32_at(values), i) if finite else u32(0x7FC00000))

    return forward


def _compile_inverse(kind: int) -> Any:
    @kernel
    def inverse(source: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        values, signs = values_stack(), factors_stack()
        _draw_factors(signs, key, u32(0))
        for group in range(first, last):
            start = group * ROTATION_NUMEL
            for i in range(ROTATION_NUMEL):
                put(u32_at(values), i, _scaled(as_f32(get(u32_at(source), start + i)), FACTOR))
            _butterflies(values)
            missing = not _finite(values)
            if start + ROTATION_NUMEL <= numel:
                for i in range(ROTATION_NUMEL):
                    value = as_f32(u32(get(u32_at(values), i) ^ get(u32_at(signs), i)))
                    store(target, start + i, value, missing, kind)
            else:
                for i in range(numel - start):
                    value = as_f32(u32(get(u32_at(values), i) ^ get(u32_at(signs), i)))
                    store(target, start + i, value, missing, kind)

    return inverse
