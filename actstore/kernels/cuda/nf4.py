"""nf4 on CUDA devices: csrc/nf4.cu."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, aligned
from actstore.kernels.cuda import launch
from actstore.kernels.cuda.groups import SUFFIX, group_blocks, log2_lanes


def kernels(dtype: torch.dtype, device: torch.device, group: int, layout: str, keep: bool, prefix: str = "") -> Kernels:
    """Return the kernels for one dtype and set of options on one device, of the source with this prefix."""
    suffix = SUFFIX[dtype] + "_bnb" * (layout == "bnb")
    run_encode = launch.launcher(f"{prefix}nf4", f"nf4_encode_{suffix}" + "_keep" * keep, device)
    run_decode = launch.launcher(f"{prefix}nf4", f"nf4_decode_{suffix}", device)
    shift = log2_lanes(group)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_encode(group_blocks(numel, group), src, aligned(out), numel, count, key, shift)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_decode(group_blocks(numel, group), aligned(buf), out, numel, count, key, shift)

    return Kernels(encode, decode)
