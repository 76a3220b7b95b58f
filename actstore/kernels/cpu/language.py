"""Building blocks of numba kernels: typed access to addresses, bit casts, and 16-bit floats, which numba lacks.

Kernels cast `np.uint32` results back after each operation: numba widens them to 64 bits, which halves the vectors.
"""

from __future__ import annotations

from functools import cache as once
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actstore.errors import KernelUnavailable
from actstore.kernels.base import Bound, Kernels
from actstore.kernels.cpu.threads import SPLIT_NBYTES, TEAM_NBYTES, split, split_in_team

try:
    import numba
    from llvmlite import ir
    from numba.core import cgutils as _cgutils
    from numba.extending import intrinsic as _intrinsic

    from actstore.kernels.cpu import cache, notice, numba_blas  # not in the digest: they change no kernel
except ImportError as error:
    raise KernelUnavailable("numba is not installed. Run pip install 'actstore[cpu]'.", package="numba") from error

numba_blas.defer()
u16 = np.uint16
u32 = np.uint32
f32 = np.float32

F32, BF16, F16 = 0, 1, 2  # kinds: compile-time constants of a kernel
KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
INF_F32 = u32(0x7F800000)
INF_BF16 = u16(0x7F80)
INF_F16 = u16(0x7C00)

# Any: numba's own annotations describe the Python side of a compiled function, not its compiled type
types: Any = numba.types
intrinsic: Any = _intrinsic
constant_intrinsic: Any = _intrinsic(prefer_literal=True)  # for arguments that are constants of the kernel
cgutils: Any = _cgutils
llvm: Any = ir  # for intrinsics in other modules
# wrappers for callers in Python and C would take a quarter of the time to compile; kernels alone call these functions
_WITHOUT_WRAPPERS: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inline: Any = numba.njit(forceinline=True, error_model="numpy", **_WITHOUT_WRAPPERS)
_compiled: Any = numba.njit(
    "void(int64,int64,int64,int64,int64,int64,int64)", nogil=True, cache=True, boundscheck=False, error_model="numpy"
)


def kernel(run: Any) -> Any:
    """Compile ``run(source, target, numel, key, extra, first, last)``, or read it from numba's cache on disk.

    It works on units `first` to `last` of `numel` elements; each kernel defines `extra` and its unit.

    Notes
    -----
    The name of a kernel is the name of its files on disk. It holds more than numba would put there:

    * the constants that its factory closed over. numba keeps all functions of one factory in one index, without a lock:
      when two processes save two of them at once, the code of one can end up under the key of the other, and that
      kernel then runs in its place for ever;
    * a digest of its source and of all kernel sources that this imports. numba itself checks only the file of the
      kernel: with a newer version of an imported one, it would go on running the old code.

    Raises
    ------
    KernelUnavailable : numba finds no folder for its cache
    """
    constants = (cell.cell_contents for cell in run.__closure__ or ())
    parts = [run.__qualname__, *(getattr(each, "__name__", str(each)) for each in constants)]
    run.__qualname__ = "_".join([*parts, cache.short_digest(Path(run.__code__.co_filename))])
    cache.folder()
    with cache.one_process(run.__qualname__), notice.compiling(run):
        return _compiled(run)


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def pointer(_typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return pointer


u8_at = _pointer_to(types.uint8)
i8_at = _pointer_to(types.int8)
u16_at = _pointer_to(types.uint16)
u32_at = _pointer_to(types.uint32)
u64_at = _pointer_to(types.uint64)
i16_at = _pointer_to(types.int16)
i32_at = _pointer_to(types.int32)


def stack_of(nbytes: int) -> Any:
    """Return a function that returns the 64-byte-aligned address of `nbytes` on the stack, one place per call site."""

    @intrinsic
    def stack(_typing: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            # of words, not bytes: numba stores zeros in each element, and LLVM takes seconds over thousands of them
            memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(512), -(-nbytes // 64)))
            memory.align = 64
            return builder.ptrtoint(memory, ir.IntType(64))

        return types.int64(), generate

    return stack


@intrinsic
def _i64(_typing: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), generate


@intrinsic
def _fetch_add(_typing: Any, _address: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _call(_typing: Any, _kernel: Any, _job: Any, _first: Any, _last: Any) -> Any:
    """Call the kernel at an address with the five arguments of a job, for units `first` to `last`."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        called, job, first, last = args
        five = (builder.inttoptr(builder.add(job, word(8 * n)), word.as_pointer()) for n in range(1, 6))
        run = builder.inttoptr(called, ir.FunctionType(ir.VoidType(), [word] * 7).as_pointer())
        builder.call(run, [*map(builder.load, five), first, last])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.int64), generate


def _run_ranges(job: int) -> None:
    """Run ranges of `threads.Ranges` until all are done, on one thread of a team."""
    units, step, called = _i64(job + 48), _i64(job + 56), _i64(job + 64)
    while True:
        first = _fetch_add(job, step)
        if first >= units:
            return
        _call(called, job, first, min(first + step, units))


@once
def _team() -> int:
    """Compile the C function for the threads of a team, of all kernels, or read it from the cache; its address."""
    compiled: Any = numba.cfunc("void(int64)", error_model="numpy", cache=True)(_run_ranges)
    return int(compiled.address)


class Parallel:
    """A kernel that runs on all units: on the calling thread, for a large tensor on torch's threads, else on our own.

    Parameters
    ----------
    run : result of `kernel`
    unit_nbytes : bytes of the tensor in one unit
    """

    def __init__(self, run: Any, unit_nbytes: int) -> None:
        self._few, self._many = TEAM_NBYTES // unit_nbytes, SPLIT_NBYTES // unit_nbytes
        self._run = run
        self._address: int | None = None  # of the kernel as a C function
        (self._only,) = run.overloads.values()
        self._compiled = self._only.entry_point  # the only signature: numba's look-up would cost a quarter more

    def __call__(self, source: int, target: int, numel: int, key: int, extra: int, units: int) -> None:
        """Run ``kernel(source, target, numel, key, extra, first, last)`` for ranges that cover ``range(units)``."""
        if units < self._few:
            self._compiled(source, target, numel, key, extra, 0, units)
            return
        args = (source, target, numel, key, extra)
        if self._address is None:
            self._address = self._only.library.get_pointer_to_function(self._only.fndesc.llvm_cfunc_wrapper_name)
        if split_in_team(_team(), self._address, args, units):
            return
        if units < self._many:
            self._run(*args, 0, units)
        else:
            split(self._run, args, units)

    def bind(self, numel: int, extra: int, units: int) -> Bound:
        """Bind the call to ``(source, target, key)``, of tensors: one call in Python where a tensor is small."""
        run: Any = self
        if units < self._few:
            run = self._compiled
            return lambda source, target, key: run(source.data_ptr(), target.data_ptr(), numel, key, extra, 0, units)
        return lambda source, target, key: run(source.data_ptr(), target.data_ptr(), numel, key, extra, units)


def in_units(encode: Parallel, decode: Parallel, unit: int, extra: int = 0) -> Kernels:
    """Return the two directions of a codec that works on units of `unit` elements; `extra` is for `encode`.

    They do not check addresses: the caller checks them once, as `Codec.encode` does, or knows its memory.
    """

    def bind(numel: int) -> tuple[Bound, Bound]:
        units = -(-numel // unit)
        return encode.bind(numel, extra, units), decode.bind(numel, 0, units)

    return Kernels(
        lambda src, out, numel, key: bind(numel)[0](src, out, key),
        lambda buf, out, numel, key: bind(numel)[1](buf, out, key),
        bind,
    )


@intrinsic
def get(_typing: Any, base: Any, _index: Any) -> Any:
    """Load ``base[index]``, without the wrap-around of negative indices that numba's arrays have."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(args[0], [args[1]], inbounds=True))

    return base.dtype(base, types.int64), generate


@intrinsic
def put(_typing: Any, base: Any, _index: Any, value: Any) -> Any:
    """Store ``base[index] = value``, cut to the width of the element."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.cast(builder, args[2], signature.args[2], base.dtype)
        builder.store(element, builder.gep(args[0], [args[1]], inbounds=True))
        return context.get_dummy_value()

    return types.none(base, types.int64, value), generate


@intrinsic
def as_f32(_typing: Any, _bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def as_u32(_typing: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@inline
def f16_to_f32(half: Any) -> Any:
    """Convert finite float16 bits to float32; no float32 denormal appears on the way."""
    moved = u32(u32(half & u32(0x7FFF)) << u32(13))
    denormal = moved < u32(0x00800000)
    bias = u32(0x38800000) if denormal else u32(0x38000000)
    excess = f32(2.0**-14) if denormal else f32(0)
    magnitude = as_u32(as_f32(u32(moved + bias)) - excess)
    return as_f32(u32(magnitude | u32(u32(half & u32(0x8000)) << u32(16))))


@inline
def f32_to_f16(magnitude: Any) -> Any:
    """Round a float32 magnitude of at most 65504 to float16 bits, ties to even."""
    denormal = u32(as_u32(as_f32(magnitude) + f32(0.5)) - u32(0x3F000000))
    odd = u32(u32(magnitude >> u32(13)) & u32(1))
    normal = u32(u32(u32(magnitude - u32(0x37FFF001)) + odd) >> u32(13))
    return denormal if magnitude < u32(0x38800000) else normal


@inline
def f32_to_bf16(magnitude: Any) -> Any:
    """Round a finite float32 magnitude to bfloat16 bits, ties to even."""
    odd = u32(u32(magnitude >> u32(16)) & u32(1))
    return u32(u32(u32(magnitude + u32(0x7FFF)) + odd) >> u32(16))


@inline
def f32_magnitude(bits: Any, kind: Any) -> Any:
    """Convert a finite magnitude of a kind, given as bits of its width, to the bits of a float32."""
    if kind == F32:
        return u32(bits)
    if kind == BF16:
        return u32(u32(bits) << u32(16))
    return as_u32(f16_to_f32(u32(bits)))


@inline
def load(source: Any, index: Any, kind: Any) -> Any:
    """Load element `index` at the address `source` as float32; float16 must be finite."""
    if kind == F32:
        return as_f32(get(u32_at(source), index))
    if kind == BF16:
        return as_f32(u32(u32(get(u16_at(source), index)) << u32(16)))
    return f16_to_f32(u32(get(u16_at(source), index)))


@inline
def load_bits(source: Any, index: Any, kind: Any) -> Any:
    """Load element `index` as bits of its own width: finite < Inf < NaN < all with a sign bit."""
    if kind == F32:
        return u32(get(u32_at(source), index))
    return u16(get(u16_at(source), index))


@inline
def load_magnitude(source: Any, index: Any, kind: Any) -> Any:
    """Load element `index` without its sign, as bits of its own width: finite < Inf < NaN."""
    if kind == F32:
        return u32(get(u32_at(source), index) & u32(0x7FFFFFFF))
    return u16(get(u16_at(source), index) & u16(0x7FFF))


@inline
def store(target: Any, index: Any, value: Any, is_nan: Any, kind: Any) -> None:
    """Write a float32, rounded to nearest even and clamped to the finite range of the kind, or NaN."""
    bits = as_u32(value)
    sign = u32(bits & u32(0x80000000))
    magnitude = u32(bits & u32(0x7FFFFFFF))
    if kind == F32:
        magnitude = u32(min(magnitude, u32(0x7F7FFFFF)))
        put(u32_at(target), index, u32(0x7FC00000) if is_nan else u32(sign | magnitude))
    elif kind == BF16:
        magnitude = u32(min(magnitude, u32(0x7F7F0000)))
        element = u32(f32_to_bf16(magnitude) | u32(sign >> u32(16)))
        put(u16_at(target), index, u16(u32(0x7FC0) if is_nan else element))
    else:
        magnitude = u32(min(magnitude, u32(0x477FE000)))
        element = u32(f32_to_f16(magnitude) | u32(sign >> u32(16)))
        put(u16_at(target), index, u16(u32(0x7E00) if is_nan else element))
