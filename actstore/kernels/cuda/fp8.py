"""fp8 on CUDA devices: csrc/fp8.cu."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, aligned
from actstore.kernels.cuda import launch
from actstore.kernels.cuda.groups import SUFFIX, group_blocks, log2_lanes

SCALE_LOW_BITS = {"linear": 0xFFFF, "pow2": 0x7FFFFF}  # bits of a float32 below the last bit of a scale


def kernels(
    dtype: torch.dtype,
    device: torch.device,
    group: int,
    scale: str,
    round: str,  # noqa: A002
    keep: bool,
    prefix: str = "",
) -> Kernels:
    """Return the kernels for one dtype and set of options on one device, of the source with this prefix."""
    options = "_noise" * (round != "nearest") + "_keep" * keep
    run_encode = launch.launcher(f"{prefix}fp8", f"fp8_encode_{SUFFIX[dtype]}{options}", device)
    run_decode = launch.launcher(f"{prefix}fp8", f"fp8_decode_{SUFFIX[dtype]}", device)
    shift, below = log2_lanes(group), SCALE_LOW_BITS[scale]

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_encode(group_blocks(numel, group), src, aligned(out), numel, count, key, shift, below)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_decode(group_blocks(numel, group), aligned(buf), out, numel, count, key, shift)

    return Kernels(encode, decode)
