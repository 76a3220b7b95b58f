"""The largest element of a group on the CPU."""

from __future__ import annotations

from typing import Any

from actstore.kernels.cpu.language import F32, cgutils, constant_intrinsic, llvm, types

LANES = 32  # elements of a vector, which LLVM splits into the processor's vectors; divides every group


@constant_intrinsic
def largest_of(_typing: Any, _address: Any, group: Any, kind: Any, signs: Any) -> Any:
    """Find the largest of `group` elements, as bits of their width: finite < Inf < NaN < all with a sign bit.

    Without `signs` the sign bits are cleared. LLVM would unroll a loop over so few elements to scalar instructions.
    `group`, `kind` and `signs` are constants of a kernel.
    """
    width = 32 if kind.literal_value == F32 else 16
    element = llvm.IntType(width)
    lanes = llvm.VectorType(element, LANES)
    steps = group.literal_value // LANES

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        unsigned = llvm.Constant(lanes, [(1 << (width - 1)) - 1] * LANES)
        first = builder.inttoptr(args[0], lanes.as_pointer())
        top = llvm.Constant(lanes, None)
        for step in range(steps):
            place = builder.gep(first, [llvm.Constant(llvm.IntType(64), step)])
            bits = builder.load(place, align=width // 8)
            if not signs.literal_value:
                bits = builder.and_(bits, unsigned)
            top = builder.select(builder.icmp_unsigned(">", bits, top), bits, top)
        reduce = llvm.FunctionType(element, [lanes])
        name = f"llvm.vector.reduce.umax.v{LANES}i{width}"
        return builder.call(cgutils.get_or_insert_function(builder.module, reduce, name), [top])

    return (types.uint32 if width == 32 else types.uint16)(types.int64, group, kind, signs), generate
