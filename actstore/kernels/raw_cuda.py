"""raw on CUDA devices: csrc/raw.cu."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, payload_pointer
from actstore.kernels.launch import THREADS, launcher

THREAD_NBYTES = 64  # RAW_THREAD_NBYTES in csrc/raw.cu


def blocks(nbytes: int) -> int:
    """Blocks of a launch."""
    return -(-nbytes // (THREAD_NBYTES * THREADS))


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Kernels for one dtype on one device."""
    run_encode, run_decode = launcher("raw", "raw_encode", device), launcher("raw", "raw_decode", device)
    itemsize = dtype.itemsize

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int) -> None:
        nbytes = numel * itemsize
        run_encode(blocks(nbytes), src.data_ptr(), payload_pointer(out), nbytes)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int) -> None:
        nbytes = numel * itemsize
        run_decode(blocks(nbytes), payload_pointer(buf), out.data_ptr(), nbytes)

    return Kernels(encode, decode, itemsize)
