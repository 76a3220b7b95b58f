"""Bit planes of tiles of 1024 bytes on the CPU: bit `b` of 64 neighboring bytes is one 64-bit word.

The code uses vectors of 64 bytes, which LLVM splits into the processor's vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from actstore.kernels.cpu.language import inline, intrinsic, stack_of, types
from actstore.kernels.planes import PLANE_NBYTES, TILE

VECTOR_NBYTES = 64  # bytes of a vector

u64 = np.uint64
tile_stack: Any = stack_of(TILE)

_BYTES = ir.VectorType(ir.IntType(8), VECTOR_NBYTES)
_BITS = ir.VectorType(ir.IntType(1), VECTOR_NBYTES)
_WORD = ir.IntType(64)


def _vector(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _BYTES.as_pointer())


def _splat(builder: Any, byte: Any) -> Any:
    one = builder.insert_element(ir.Constant(_BYTES, ir.Undefined), byte, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), VECTOR_NBYTES), [0] * VECTOR_NBYTES)
    return builder.shuffle_vector(one, ir.Constant(_BYTES, ir.Undefined), lanes)


def _constant(byte: int) -> Any:
    return ir.Constant(_BYTES, [byte] * VECTOR_NBYTES)


def _comparison(relation: str) -> Any:
    @intrinsic
    def compare(_typing: Any, _address: Any, _byte: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            vector = builder.load(_vector(builder, args[0]), align=1)
            return builder.bitcast(builder.icmp_unsigned(relation, vector, _splat(builder, args[1])), _WORD)

        return types.uint64(types.int64, types.uint8), generate

    return compare


# (address, byte): bit `i` is set where byte `i` of 64 is at least, or equal to, `byte`
at_least = _comparison(">=")
equal_to = _comparison("==")


@intrinsic
def popcount(_typing: Any, _word: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@intrinsic
def lowest(_typing: Any, _word: Any) -> Any:
    """Find the index of the lowest set bit of a word that is not 0."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


def _writer(width: int) -> Any:
    @intrinsic
    def write(_typing: Any, _codes: Any, _planes: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            codes = builder.load(_vector(builder, args[0]), align=1)
            for bit in range(width):
                chosen = builder.and_(codes, _constant(1 << bit))
                word = builder.bitcast(builder.icmp_unsigned("!=", chosen, _constant(0)), _WORD)
                place = builder.add(args[1], ir.Constant(_WORD, PLANE_NBYTES * bit))
                builder.store(word, builder.inttoptr(place, _WORD.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64), generate

    return write


def _reader(width: int) -> Any:
    @intrinsic
    def read(_typing: Any, _planes: Any, _codes: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            codes = _constant(0)
            for bit in range(width):
                place = builder.add(args[0], ir.Constant(_WORD, PLANE_NBYTES * bit))
                word = builder.load(builder.inttoptr(place, _WORD.as_pointer()), align=1)
                chosen = builder.select(builder.bitcast(word, _BITS), _constant(1 << bit), _constant(0))
                codes = builder.or_(codes, chosen)
            builder.store(codes, _vector(builder, args[1]), align=1)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64), generate

    return read


def _of_a_tile(move: Any, codes_first: bool) -> Any:
    """Return a function that calls `move` for the 16 vectors of a tile."""

    @inline
    def run(codes: Any, planes: Any) -> None:
        for step in range(TILE // VECTOR_NBYTES):
            if codes_first:
                move(codes + step * VECTOR_NBYTES, planes + step * 8)
            else:
                move(planes + step * 8, codes + step * VECTOR_NBYTES)

    return run


_w1, _w2, _w3, _w4, _w5, _w6, _w7, _w8 = (_of_a_tile(_writer(width), True) for width in range(1, 9))
_r1, _r2, _r3, _r4, _r5, _r6, _r7, _r8 = (_of_a_tile(_reader(width), False) for width in range(1, 9))


@inline
def write_planes(codes: Any, planes: Any, width: Any) -> None:
    """Write the low `width` bits, 0 to 8, of the 1024 bytes at `codes` as planes of 128 bytes each."""
    if width == 1:
        _w1(codes, planes)
    elif width == 2:
        _w2(codes, planes)
    elif width == 3:
        _w3(codes, planes)
    elif width == 4:
        _w4(codes, planes)
    elif width == 5:
        _w5(codes, planes)
    elif width == 6:
        _w6(codes, planes)
    elif width == 7:
        _w7(codes, planes)
    elif width == 8:
        _w8(codes, planes)


@inline
def read_planes(planes: Any, codes: Any, width: Any) -> None:
    """Read the planes of `write_planes` back, for a width of 1 to 8."""
    if width == 1:
        _r1(codes, planes)
    elif width == 2:
        _r2(codes, planes)
    elif width == 3:
        _r3(codes, planes)
    elif width == 4:
        _r4(codes, planes)
    elif width == 5:
        _r5(codes, planes)
    elif width == 6:
        _r6(codes, planes)
    elif width == 7:
        _r7(codes, planes)
    else:
        _r8(codes, planes)
