"""int8 of elements without a sign bit on the CPU, as after ReLU, where signs are kept. The bytes: csrc/int8.md."""

from __future__ import annotations

from typing import Any

from actstore.kernels.cpu.language import BF16, F32, constant_intrinsic, llvm, types

LANES = 32  # elements at once; divides every group
_U8, _U16, _U32, _F32 = llvm.IntType(8), llvm.IntType(16), llvm.IntType(32), llvm.FloatType()
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer, ties to even, in the low bits


@constant_intrinsic
def put_codes(_typing: Any, _source: Any, _codes: Any, reciprocal: Any, noise: Any, kind: Any, noisy: Any) -> Any:
    """Store the codes of `LANES` elements; the code of an element that is not zero is at least 1.

    For a loop LLVM would make vectors with as many lanes as floats fit, and a mask for each; these have as many lanes
    as codes fit.

    Parameters
    ----------
    source, codes, noise : addresses; `noise` is read where `noisy`
    reciprocal : a float32, 1 / scale of all elements, or the address of one for each
    kind, noisy : constants of a kernel; elements are finite, and no sign bit is set, not even of a zero
    """
    count, each = LANES, reciprocal == types.int64

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, codes, scale, random = args[:4]
        bits = _load(builder, source, _U32 if kind.literal_value == F32 else _U16, count)
        factors = _load(builder, scale, _F32, count) if each else _spread(builder, scale, count)
        steps = builder.fmul(_values(builder, bits, kind.literal_value), factors)
        if noisy.literal_value:
            drawn = builder.uitofp(_load(builder, random, _U8, count), llvm.VectorType(_F32, count))
            drawn = builder.fsub(builder.fmul(drawn, _all(drawn.type, 2.0**-8)), _all(drawn.type, 0.498046875))
            steps = builder.fadd(steps, drawn)
        rounded = builder.bitcast(builder.fadd(steps, _all(steps.type, _MAGIC)), llvm.VectorType(_U32, count))
        found = builder.trunc(rounded, llvm.VectorType(_U8, count))
        one = _all(found.type, 1)
        least = builder.select(builder.icmp_unsigned(">", found, one), found, one)
        zero = builder.icmp_unsigned("==", bits, _all(bits.type, 0))
        kept = builder.select(zero, _all(found.type, 0), least)
        builder.store(kept, builder.inttoptr(codes, kept.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, reciprocal, types.int64, kind, noisy), generate


def _all(vector: Any, number: float) -> Any:
    return llvm.Constant(vector, [number] * vector.count)


def _load(builder: Any, address: Any, element: Any, count: int) -> Any:
    pointer = builder.inttoptr(address, llvm.VectorType(element, count).as_pointer())
    return builder.load(pointer, align=1 if element is _U8 else 2 if element is _U16 else 4)


def _spread(builder: Any, number: Any, count: int) -> Any:
    empty = llvm.Constant(llvm.VectorType(number.type, count), llvm.Undefined)
    first = builder.insert_element(empty, number, llvm.Constant(_U32, 0))
    return builder.shuffle_vector(first, empty, _all(llvm.VectorType(_U32, count), 0))


def _values(builder: Any, bits: Any, kind: int) -> Any:
    """Convert elements to float32, as `language.load` does."""
    wide, floats = llvm.VectorType(_U32, bits.type.count), llvm.VectorType(_F32, bits.type.count)
    if kind == F32:
        return builder.bitcast(bits, floats)
    if kind == BF16:
        return builder.bitcast(builder.shl(builder.zext(bits, wide), _all(wide, 16)), floats)
    moved = builder.shl(builder.zext(bits, wide), _all(wide, 13))
    denormal = builder.icmp_unsigned("<", moved, _all(wide, 0x00800000))
    bias = builder.select(denormal, _all(wide, 0x38800000), _all(wide, 0x38000000))
    excess = builder.select(denormal, _all(floats, 2.0**-14), _all(floats, 0.0))
    return builder.fsub(builder.bitcast(builder.add(moved, bias), floats), excess)
