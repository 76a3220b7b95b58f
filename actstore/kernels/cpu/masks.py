"""Masks of 32 elements at once on the CPU, and moves of the elements that a mask names.

The last arguments of these functions, sizes of elements and groups, are constants of the kernel that calls them.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir

from actstore.kernels.cpu.language import cgutils, constant_intrinsic, intrinsic, types

LANES = 32
WIDTHS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# one instruction each; on processors without them loops over elements are faster than LLVM's expansion
COMPRESSES = all(
    llvmlite.binding.get_host_cpu_features().get(name) for name in ("avx512f", "avx512bw", "avx512vl", "avx512vbmi2")
)
_UNSIGNED = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}
_FLAGS = ir.VectorType(ir.IntType(1), LANES)
_INDICES = ir.VectorType(ir.IntType(32), LANES)


def _lanes(itemsize: int) -> Any:
    return ir.VectorType(ir.IntType(8 * itemsize), LANES)


def _load(builder: Any, address: Any, itemsize: int) -> Any:
    return builder.load(builder.inttoptr(address, _lanes(itemsize).as_pointer()), align=itemsize)


def _splat(builder: Any, value: Any, itemsize: int) -> Any:
    lanes = _lanes(itemsize)
    narrow = value if itemsize == 8 else builder.trunc(value, lanes.element)
    one = builder.insert_element(ir.Constant(lanes, ir.Undefined), narrow, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(_INDICES, None))


def _comparison(operator: str) -> Any:
    @constant_intrinsic
    def compare(_typing: Any, _address: Any, _value: Any, itemsize: Any) -> Any:
        size = itemsize.literal_value

        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            values, other = _load(builder, args[0], size), _splat(builder, args[1], size)
            return builder.bitcast(builder.icmp_unsigned(operator, values, other), ir.IntType(32))

        return types.uint32(types.int64, types.uint64, itemsize), generate

    return compare


# (address, value, itemsize): bit `i` says whether element `i` of 32, unsigned, is ... `value`
differ = _comparison("!=")
equal = _comparison("==")
above = _comparison(">")
at_least = _comparison(">=")


@constant_intrinsic
def elements(_typing: Any, _address: Any, itemsize: Any) -> Any:
    """Turn an address into a pointer for `get` and `put` to unsigned integers of `itemsize` bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(_UNSIGNED[itemsize.literal_value])(types.int64, itemsize), generate


@constant_intrinsic
def compress(_typing: Any, _source: Any, _target: Any, _mask: Any, itemsize: Any) -> Any:
    """Write those of 32 elements at `source` whose bits are set to `target`, side by side."""
    size = itemsize.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes, pointer = _lanes(size), ir.IntType(8 * size).as_pointer()
        name = f"llvm.masked.compressstore.v{LANES}i{8 * size}"
        kind = ir.FunctionType(ir.VoidType(), [lanes, pointer, _FLAGS])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        target = builder.inttoptr(args[1], pointer)
        builder.call(function, [_load(builder, args[0], size), target, builder.bitcast(args[2], _FLAGS)])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.uint32, itemsize), generate


@constant_intrinsic
def expand(_typing: Any, _source: Any, _target: Any, _mask: Any, itemsize: Any) -> Any:
    """Write 32 elements to `target`: where bits are set the next ones at `source`, elsewhere zero."""
    size = itemsize.literal_value

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes, pointer = _lanes(size), ir.IntType(8 * size).as_pointer()
        name = f"llvm.masked.expandload.v{LANES}i{8 * size}"
        kind = ir.FunctionType(lanes, [pointer, _FLAGS, lanes])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        source, mask = builder.inttoptr(args[0], pointer), builder.bitcast(args[2], _FLAGS)
        found = builder.call(function, [source, mask, ir.Constant(lanes, None)])
        builder.store(found, builder.inttoptr(args[1], lanes.as_pointer()), align=size)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.uint32, itemsize), generate


@constant_intrinsic
def largest(_typing: Any, _address: Any, _keep: Any, group: Any, itemsize: Any) -> Any:
    """Mark the floats of 32 that are among the `keep` largest of their `group` consecutive ones, a bit each.

    The comparison is of magnitudes as bits; of equal ones the first is larger.
    """
    count, size = group.literal_value, itemsize.literal_value

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        lanes = _lanes(size)
        magnitude = ir.Constant(lanes, [(1 << (8 * size - 1)) - 1] * LANES)
        values = builder.and_(_load(builder, args[0], size), magnitude)
        larger = ir.Constant(lanes, None)  # for each element, the count of elements of its group that come before it
        for turn in range(1, count):
            other = [i // count * count + (i + turn) % count for i in range(LANES)]
            first = ir.Constant(_FLAGS, [other[i] < i for i in range(LANES)])
            others = builder.shuffle_vector(values, values, ir.Constant(_INDICES, other))
            ties = builder.and_(builder.icmp_unsigned("==", others, values), first)
            wins = builder.or_(builder.icmp_unsigned(">", others, values), ties)
            larger = builder.sub(larger, builder.sext(wins, lanes))
        kept = builder.icmp_unsigned("<", larger, _splat(builder, args[1], size))
        return builder.bitcast(kept, ir.IntType(32))

    return types.uint32(types.int64, types.uint64, group, itemsize), generate


@intrinsic
def popcount(_typing: Any, _mask: Any) -> Any:
    """Count the set bits of a word."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.zext(builder.ctpop(args[0]), ir.IntType(64))

    return types.int64(types.uint32), generate
