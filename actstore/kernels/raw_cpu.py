"""raw on the CPU: a copy that needs no compiler. The bytes: csrc/raw.md."""

from __future__ import annotations

from ctypes import memmove

import torch

from actstore.kernels.base import Kernels, payload_pointer
from actstore.kernels.threads import SPLIT_NBYTES, split

BLOCK = 1 << 16  # bytes: a range of a split copy is a whole number of these


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Kernels for one dtype."""
    itemsize = dtype.itemsize

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        _copy(src.data_ptr(), payload_pointer(out), numel * itemsize)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        _copy(payload_pointer(buf), out.data_ptr(), numel * itemsize)

    return Kernels(encode, decode)


def _copy(source: int, target: int, nbytes: int) -> None:
    if nbytes < SPLIT_NBYTES:
        memmove(target, source, nbytes)
    else:
        split(_copy_blocks, (source, target, nbytes), -(-nbytes // BLOCK))


def _copy_blocks(source: int, target: int, nbytes: int, first: int, last: int) -> None:
    start = first * BLOCK
    memmove(target + start, source + start, min(last * BLOCK, nbytes) - start)
