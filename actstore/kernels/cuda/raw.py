"""raw on CUDA devices: csrc/raw.cu."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, aligned
from actstore.kernels.cuda import launch

THREAD_NBYTES = 64  # RAW_THREAD_NBYTES in csrc/raw.cu


def blocks(nbytes: int) -> int:
    """Count the blocks of a launch."""
    return -(-nbytes // (THREAD_NBYTES * launch.THREADS))


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for one dtype on one device."""
    run_encode, run_decode = (launch.launcher("raw", kernel, device) for kernel in ("raw_encode", "raw_decode"))
    itemsize = dtype.itemsize

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        nbytes = numel * itemsize
        run_encode(blocks(nbytes), src, aligned(out), nbytes)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        nbytes = numel * itemsize
        run_decode(blocks(nbytes), aligned(buf), out, nbytes)

    return Kernels(encode, decode)
