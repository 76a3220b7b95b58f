"""bit1 on CUDA devices: csrc/bit1.cu."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, aligned
from actstore.kernels.cuda import launch

THREAD_NUMEL = 32  # elements per thread, in csrc/bit1.cu


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for bools on one device."""
    run_encode, run_decode = (launch.launcher("bit1", kernel, device) for kernel in ("bit1_encode", "bit1_decode"))

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_encode(_blocks(numel), src, aligned(out), numel, count)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_decode(_blocks(numel), aligned(buf), out, numel, count)

    return Kernels(encode, decode)


def _blocks(numel: int) -> int:
    return -(-numel // (THREAD_NUMEL * launch.THREADS))
