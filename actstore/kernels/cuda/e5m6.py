"""e5m6 on CUDA devices: csrc/e5m6.cu."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, aligned
from actstore.kernels.cuda import launch
from actstore.kernels.cuda.groups import SUFFIX

THREAD_NUMEL = 16  # elements per thread, in csrc/e5m6.cu


def kernels(dtype: torch.dtype, device: torch.device, keep: bool) -> Kernels:
    """Return the kernels for one dtype on one device."""
    run_encode = launch.launcher("e5m6", f"e5m6_encode_{SUFFIX[dtype]}" + "_keep" * keep, device)
    run_decode = launch.launcher("e5m6", f"e5m6_decode_{SUFFIX[dtype]}", device)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_encode(_blocks(numel), src, aligned(out), numel, count)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_decode(_blocks(numel), aligned(buf), out, numel, count)

    return Kernels(encode, decode)


def _blocks(numel: int) -> int:
    return -(-numel // (THREAD_NUMEL * launch.THREADS))
