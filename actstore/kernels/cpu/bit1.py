"""bit1 on the CPU. The bytes: csrc/bit1.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from actstore.kernels.base import Kernels
from actstore.kernels.cpu.language import Parallel, get, in_units, intrinsic, kernel, llvm, put, types, u8_at

WORD = 64  # elements whose bits are packed at once
BLOCK = 64 * WORD  # elements in a unit of work


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for bools; compiled at first use, then read from numba's disk cache."""
    return in_units(_run_encode, _run_decode, BLOCK)


_BYTES = llvm.VectorType(llvm.IntType(8), WORD)
_BITS = llvm.VectorType(llvm.IntType(1), WORD)
_MASK = llvm.IntType(WORD)


@intrinsic
def _pack(_typing: Any, _source: Any, _target: Any) -> Any:
    """Write a bit for each of 64 bytes: whether it is not 0."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        loaded = builder.load(builder.inttoptr(args[0], _BYTES.as_pointer()), align=1)
        bits = builder.icmp_unsigned("!=", loaded, llvm.Constant(_BYTES, None))
        builder.store(builder.bitcast(bits, _MASK), builder.inttoptr(args[1], _MASK.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@intrinsic
def _unpack(_typing: Any, _source: Any, _target: Any) -> Any:
    """Write a byte, 0 or 1, for each of 64 bits."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        mask = builder.load(builder.inttoptr(args[0], _MASK.as_pointer()), align=8)
        found = builder.zext(builder.bitcast(mask, _BITS), _BYTES)
        builder.store(found, builder.inttoptr(args[1], _BYTES.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@kernel
def _encode(source: int, payload: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
    stop = min(last * BLOCK, numel)
    whole = stop // WORD * WORD
    for i in range(first * BLOCK, whole, WORD):
        _pack(source + i, payload + i // 8)
    for start in range(whole, stop, 8):
        bits = 0
        for i in range(start, min(start + 8, stop)):
            bits |= (get(u8_at(source), i) != 0) << (i - start)
        put(u8_at(payload), start // 8, np.uint8(bits))


@kernel
def _decode(payload: int, target: int, numel: int, key: int, extra: int, first: int, last: int) -> None:
    stop = min(last * BLOCK, numel)
    whole = stop // WORD * WORD
    for i in range(first * BLOCK, whole, WORD):
        _unpack(payload + i // 8, target + i)
    for i in range(whole, stop):
        put(u8_at(target), i, np.uint8(get(u8_at(payload), i // 8) >> (i % 8) & 1))


_run_encode = Parallel(_encode, BLOCK)
_run_decode = Parallel(_decode, BLOCK)
