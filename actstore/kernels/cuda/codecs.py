"""Kernels of the codecs on CUDA devices: sources in csrc/, names of the kernels in them, and sizes of launches.

Each function returns the kernels of the codecs of its name (`KernelCodec.kernel_name`) for a dtype, a device and their
options. A `prefix` names the source that also rotates, for hadamard128.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from actstore.kernels.affine import widths
from actstore.kernels.base import Inner, Kernels, aligned
from actstore.kernels.cuda import launch
from actstore.kernels.cuda.launch import THREADS, tile_blocks
from actstore.kernels.cuda.sparse import sparse
from actstore.kernels.hadamard128 import ROTATION_NUMEL, around
from actstore.kernels.planes import TILE

__all__ = [
    "affine", "bit1", "e5m6", "expack", "fp8", "hadamard128", "int8", "int8_token", "intpack", "nf4", "raw", "sparse",
]  # fmt: skip

# elements, or bytes, of a thread in the sources
BIT1_NUMEL = 32
E5M6_NUMEL = 16
GROUPS_NUMEL = 32  # csrc/groups.cuh
RAW_NBYTES = 64
TOKEN_COLUMNS = 64  # of a block of threads, in csrc/int8_token.cu
CHUNK_TILES = 1024  # tiles whose lengths one block adds
SCALE_LOW_BITS = {"linear": 0xFFFF, "pow2": 0x7FFFFF}  # bits of a float32 below the last bit of a scale
FLOATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
INTEGERS = {
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "u8",
}


def raw(dtype: torch.dtype, device: torch.device) -> Kernels:
    run_encode, run_decode = (launch.launcher("raw", kernel, device) for kernel in ("raw_encode", "raw_decode"))
    itemsize = dtype.itemsize

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        nbytes = numel * itemsize
        run_encode(-(-nbytes // (RAW_NBYTES * THREADS)), src, aligned(out), nbytes)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        nbytes = numel * itemsize
        run_decode(-(-nbytes // (RAW_NBYTES * THREADS)), aligned(buf), out, nbytes)

    return Kernels(encode, decode)


def bit1(dtype: torch.dtype, device: torch.device) -> Kernels:
    return _of_elements("bit1", "bit1_encode", "bit1_decode", device, BIT1_NUMEL)


def e5m6(dtype: torch.dtype, device: torch.device, keep: bool) -> Kernels:
    names = f"e5m6_encode_{FLOATS[dtype]}{'_keep' * keep}", f"e5m6_decode_{FLOATS[dtype]}"
    return _of_elements("e5m6", *names, device, E5M6_NUMEL)


def int8(dtype: torch.dtype, device: torch.device, group: int, round: str, keep: bool, prefix: str = "") -> Kernels:  # noqa: A002
    return _of_groups(f"{prefix}int8", *_rounding("int8", dtype, round, keep), device, group)


def affine(
    dtype: torch.dtype,
    device: torch.device,
    bits: int,
    group: int,
    round: str,  # noqa: A002
    keep: bool,
    prefix: str = "",
) -> Kernels:
    source = "affine_planes" if widths(bits)[1] else "affine"
    return _of_groups(prefix + source, *_rounding(f"affine{bits}", dtype, round, keep), device, group)


def fp8(
    dtype: torch.dtype,
    device: torch.device,
    group: int,
    scale: str,
    round: str,  # noqa: A002
    keep: bool,
    prefix: str = "",
) -> Kernels:
    names = _rounding("fp8", dtype, round, keep)
    return _of_groups(f"{prefix}fp8", *names, device, group, SCALE_LOW_BITS[scale])


def nf4(dtype: torch.dtype, device: torch.device, group: int, layout: str, keep: bool, prefix: str = "") -> Kernels:
    suffix = FLOATS[dtype] + "_bnb" * (layout == "bnb")
    names = f"nf4_encode_{suffix}{'_keep' * keep}", f"nf4_decode_{suffix}"
    return _of_groups(f"{prefix}nf4", *names, device, group)


def int8_token(dtype: torch.dtype, device: torch.device, group: int, round: str, keep: bool) -> Kernels:  # noqa: A002
    names = _rounding("int8_token", dtype, round, keep)
    run_encode, run_decode = (launch.launcher("int8_token", kernel, device) for kernel in names)

    def blocks(numel: int, columns: int) -> int:
        return -(-numel // (columns * group)) * -(-columns // TOKEN_COLUMNS)

    def encode(numel: int, columns: int, src: torch.Tensor, out: torch.Tensor, key: int) -> None:
        run_encode(blocks(numel, columns), src, aligned(out), numel, key, group, columns)

    def decode(numel: int, columns: int, buf: torch.Tensor, out: torch.Tensor, key: int) -> None:
        run_decode(blocks(numel, columns), aligned(buf), out, numel, key, group, columns)

    return int8(dtype, device, group, round, keep)._replace(
        rows=lambda numel, columns: (partial(encode, numel, columns), partial(decode, numel, columns))
    )


def expack(dtype: torch.dtype, device: torch.device) -> Kernels:
    return _of_planes("expack", FLOATS[dtype], device)


def intpack(dtype: torch.dtype, device: torch.device) -> Kernels:
    return _of_planes("intpack", INTEGERS[dtype], device)


# these also have a source hadamard128_*.cu
IN_ONE_PASS: dict[str, Callable[..., Kernels]] = {"affine": affine, "fp8": fp8, "int8": int8, "nf4": nf4}


def hadamard128(dtype: torch.dtype, device: torch.device, inner: Inner) -> Kernels:
    options = inner._options()
    if inner.kernel_name in IN_ONE_PASS and options.get("layout") != "bnb":
        return IN_ONE_PASS[inner.kernel_name](dtype, device, **options, prefix="hadamard128_")
    run_forward, run_inverse = (
        launch.launcher("hadamard128", f"hadamard128_{way}_{FLOATS[dtype]}", device) for way in ("forward", "inverse")
    )

    def forward(src: torch.Tensor, scratch: torch.Tensor, numel: int, key: int) -> None:
        run_forward(_group_blocks(numel, ROTATION_NUMEL), src, scratch, numel, key)

    def inverse(scratch: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        run_inverse(_group_blocks(numel, ROTATION_NUMEL), scratch, out, numel, key)

    return around(inner.kernels("cuda", torch.float32, device), device, forward, inverse)


def _rounding(name: str, dtype: torch.dtype, round: str, keep: bool) -> tuple[str, str]:  # noqa: A002
    """Return the names of the kernels that encode and decode, by their rounding."""
    kept = "_keep" * keep
    noise, dither = "_noise" * (round != "nearest"), ("_dither" + kept) * (round == "dither")
    return f"{name}_encode_{FLOATS[dtype]}{noise}{kept}", f"{name}_decode_{FLOATS[dtype]}{dither}"


def _of_groups(
    source: str, encoding: str, decoding: str, device: torch.device, group: int, *encoding_words: int
) -> Kernels:
    """Return the kernels of a codec of groups; `encoding_words` are further parameters of the one that encodes."""
    run_encode, run_decode = (launch.launcher(source, kernel, device) for kernel in (encoding, decoding))
    shift = (group // GROUPS_NUMEL).bit_length() - 1  # the binary logarithm of the number of threads that share a group

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_encode(_group_blocks(numel, group), src, aligned(out), numel, count, key, shift, *encoding_words)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_decode(_group_blocks(numel, group), aligned(buf), out, numel, count, key, shift)

    return Kernels(encode, decode)


def _group_blocks(numel: int, group: int) -> int:
    """Count the blocks of a launch with a thread for each 32 elements of whole groups."""
    return -(-(-(-numel // group) * group // GROUPS_NUMEL) // THREADS)


def _of_elements(source: str, encoding: str, decoding: str, device: torch.device, thread_numel: int) -> Kernels:
    """Return the kernels of a codec without groups, whose threads take `thread_numel` elements each."""
    run_encode, run_decode = (launch.launcher(source, kernel, device) for kernel in (encoding, decoding))
    block_numel = thread_numel * THREADS

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_encode(-(-numel // block_numel), src, aligned(out), numel, count)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_decode(-(-numel // block_numel), aligned(buf), out, numel, count)

    return Kernels(encode, decode)


def _of_planes(name: str, suffix: str, device: torch.device) -> Kernels:
    """Return the kernels of a codec of bit planes, which measure all tiles, add their lengths, and write the tiles."""
    measure, add, place, write, read = (
        launch.launcher(name, f"{name}_{part}_{suffix}", device)
        for part in ("measure", "add", "place", "write", "decode")
    )

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        blocks, chunks = tile_blocks(numel), -(-numel // (TILE * CHUNK_TILES))
        measure(blocks, src, aligned(out), numel, count)
        add(chunks, out, numel, count)
        place(chunks, out, numel, count)
        write(blocks, src, out, numel, count)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        read(tile_blocks(numel), aligned(buf), out, numel, count)

    return Kernels(encode, decode)
