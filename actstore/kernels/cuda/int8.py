"""int8 on CUDA devices: csrc/int8.cu."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, aligned
from actstore.kernels.cuda import launch
from actstore.kernels.cuda.groups import SUFFIX, group_blocks, log2_lanes


def kernels(dtype: torch.dtype, device: torch.device, group: int, round: str, keep: bool, prefix: str = "") -> Kernels:  # noqa: A002
    """Return the kernels for one dtype and set of options on one device, of the source with this prefix."""
    kept = "_keep" * keep
    noise, dither = "_noise" * (round != "nearest"), ("_dither" + kept) * (round == "dither")
    run_encode = launch.launcher(f"{prefix}int8", f"int8_encode_{SUFFIX[dtype]}{noise}{kept}", device)
    run_decode = launch.launcher(f"{prefix}int8", f"int8_decode_{SUFFIX[dtype]}{dither}", device)
    shift = log2_lanes(group)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_encode(group_blocks(numel, group), src, aligned(out), numel, count, key, shift)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_decode(group_blocks(numel, group), aligned(buf), out, numel, count, key, shift)

    return Kernels(encode, decode)
