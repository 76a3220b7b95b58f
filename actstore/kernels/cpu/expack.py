"""expack on the CPU. The bytes: csrc/expack.md."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from actstore.kernels.base import Kernels, payload_pointer
from actstore.kernels.cpu.expack_tiles import compile_measure, compile_read, compile_scan, compile_write
from actstore.kernels.cpu.language import KINDS, Parallel
from actstore.kernels.expack import altered, check
from actstore.kernels.planes import TILE


@cache
def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for one dtype; compiled at first use, then read from numba's disk cache."""
    kind, itemsize = KINDS[dtype], dtype.itemsize
    measure, write, read = (
        Parallel(compile_for(kind), TILE * itemsize) for compile_for in (compile_measure, compile_write, compile_read)
    )
    scan = compile_scan(kind)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> int:
        payload, source, tiles = payload_pointer(out), src.data_ptr(), -(-numel // TILE)
        measure(source, payload, numel, 0, 0, tiles)
        scan(0, payload, numel, 0, 0, 0, tiles)
        write(source, payload, numel, 0, 0, tiles)
        return (ctypes.c_int64 * 2).from_address(payload)[0]

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload = payload_pointer(buf)
        length = check(buf, numel, itemsize)
        wrong = ctypes.c_int64(0)
        read(payload, out.data_ptr(), numel, ctypes.addressof(wrong), length, -(-numel // TILE))
        if wrong.value:
            raise altered()

    return Kernels(encode, decode)
