"""Kernels for gates of ReLU on the CPU: bits of its results, given to other values. The bytes are those of bit1.

The kernels read elements as integers: a float is 0 where all bits below its sign are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from actstore.kernels.cpu.language import Parallel, constant_intrinsic, get, kernel, llvm, put, types, u8_at
from actstore.kernels.cpu.masks import elements

WORD = 64  # elements whose bits are packed at once
BLOCK = 64 * WORD  # elements in a unit of work
_MASK = llvm.IntType(WORD)
_FLAGS = llvm.VectorType(llvm.IntType(1), WORD)


class Gates(NamedTuple):
    """The two kernels for one dtype.

    Attributes
    ----------
    pack : (values, bits, numel) writes a bit for each of `numel` values in storage order: whether it is not 0
    let_pass : (bits, values, out, numel) writes a value, raised to the smallest normal number, where its bit is set,
        and 0 elsewhere; NaN passes as it is. `out` may be `values`
    """

    pack: Callable[[torch.Tensor, torch.Tensor, int], None]
    let_pass: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]


@cache
def gates(dtype: torch.dtype) -> Gates:
    """Return the kernels for a dtype of real floats; compiled at first use, then read from numba's disk cache."""
    of_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    info = torch.finfo(dtype)
    tiny, inf = (int(torch.tensor(value, dtype=dtype).view(of_integers)) for value in (info.tiny, float("inf")))
    run_pack = Parallel(_pack_kernel(dtype.itemsize), BLOCK * dtype.itemsize)
    run_let = Parallel(_let_kernel(dtype.itemsize, tiny, inf), BLOCK * dtype.itemsize)

    def pack(values: torch.Tensor, bits: torch.Tensor, numel: int) -> None:
        run_pack(values.data_ptr(), bits.data_ptr(), numel, 0, 0, -(-numel // BLOCK))

    def let_pass(bits: torch.Tensor, values: torch.Tensor, out: torch.Tensor, numel: int) -> None:
        run_let(bits.data_ptr(), out.data_ptr(), numel, values.data_ptr(), 0, -(-numel // BLOCK))

    return Gates(pack, let_pass)


def _lanes(itemsize: int) -> Any:
    return llvm.VectorType(llvm.IntType(8 * itemsize), WORD)


def _all(lanes: Any, value: int) -> Any:
    return llvm.Constant(lanes, [value] * WORD)


@constant_intrinsic
def _pack(_typing: Any, _source: Any, _target: Any, itemsize: Any) -> Any:
    """Write a bit for each of 64 elements: whether it is not 0."""
    lanes = _lanes(itemsize.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        loaded = builder.load(builder.inttoptr(args[0], lanes.as_pointer()), align=itemsize.literal_value)
        bits = builder.icmp_unsigned("!=", builder.shl(loaded, _all(lanes, 1)), llvm.Constant(lanes, None))
        builder.store(builder.bitcast(bits, _MASK), builder.inttoptr(args[1], _MASK.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, itemsize), generate


@constant_intrinsic
def _let(_typing: Any, _bits: Any, _source: Any, _target: Any, itemsize: Any, tiny: Any, inf: Any) -> Any:
    """Write each of 64 elements that passes, `tiny` where it is less, and 0 where it does not pass."""
    size = itemsize.literal_value
    lanes, sign = _lanes(size), 1 << 8 * size - 1
    least, most = tiny.literal_value, inf.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        mask = builder.load(builder.inttoptr(args[0], _MASK.as_pointer()), align=8)
        passes = builder.bitcast(mask, _FLAGS)
        found = builder.load(builder.inttoptr(args[1], lanes.as_pointer()), align=size)
        magnitude = builder.and_(found, _all(lanes, sign - 1))
        less = builder.icmp_signed("<", found, _all(lanes, least))
        number = builder.icmp_unsigned("<=", magnitude, _all(lanes, most))  # a negative NaN is less, too
        raised = builder.select(builder.and_(less, number), _all(lanes, least), found)
        given = builder.select(passes, raised, llvm.Constant(lanes, None))
        builder.store(given, builder.inttoptr(args[2], lanes.as_pointer()), align=size)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, itemsize, tiny, inf), generate


@cache
def _pack_kernel(itemsize: int) -> Any:
    magnitudes = np.uint64((1 << 8 * itemsize - 1) - 1)

    @kernel
    def run(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
        stop = min(last * BLOCK, numel)
        whole = stop // WORD * WORD
        for i in range(first * BLOCK, whole, WORD):
            _pack(source + i * itemsize, payload + i // 8, itemsize)
        for start in range(whole, stop, 8):
            bits = 0
            for i in range(start, min(start + 8, stop)):
                bits |= (np.uint64(get(elements(source, itemsize), i)) & magnitudes != 0) << (i - start)
            put(u8_at(payload), start // 8, np.uint8(bits))

    return run


@cache
def _let_kernel(itemsize: int, tiny: int, inf: int) -> Any:
    magnitudes, least, most = np.uint64((1 << 8 * itemsize - 1) - 1), np.uint64(tiny), np.uint64(inf)

    @kernel
    def run(payload: int, target: int, numel: int, source: int, extra: int, first: int, last: int) -> None:
        stop = min(last * BLOCK, numel)
        whole = stop // WORD * WORD
        for i in range(first * BLOCK, whole, WORD):
            _let(payload + i // 8, source + i * itemsize, target + i * itemsize, itemsize, tiny, inf)
        for i in range(whole, stop):
            found = np.uint64(get(elements(source, itemsize), i))
            if (found < least or found > magnitudes) and found & magnitudes <= most:
                found = least
            if get(u8_at(payload), i // 8) >> (i % 8) & 1 == 0:
                found = np.uint64(0)
            put(elements(target, itemsize), i, found)

    return run
