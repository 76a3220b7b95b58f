"""Affine blocks on CUDA devices: csrc/affine.cu, and csrc/affine_planes.cu where a code is in two planes."""

from __future__ import annotations

import torch

from actstore.kernels.affine import widths
from actstore.kernels.base import Kernels, aligned
from actstore.kernels.cuda import launch
from actstore.kernels.cuda.groups import SUFFIX, group_blocks, log2_lanes


def kernels(
    dtype: torch.dtype,
    device: torch.device,
    bits: int,
    group: int,
    round: str,  # noqa: A002
    keep: bool,
    prefix: str = "",
) -> Kernels:
    """Return the kernels for one dtype and set of options on one device, of the source with this prefix."""
    source = prefix + ("affine_planes" if widths(bits)[1] else "affine")
    kept = "_keep" * keep
    noise, dither = "_noise" * (round != "nearest"), ("_dither" + kept) * (round == "dither")
    run_encode = launch.launcher(source, f"affine{bits}_encode_{SUFFIX[dtype]}{noise}{kept}", device)
    run_decode = launch.launcher(source, f"affine{bits}_decode_{SUFFIX[dtype]}{dither}", device)
    shift = log2_lanes(group)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_encode(group_blocks(numel, group), src, aligned(out), numel, count, key, shift)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        run_decode(group_blocks(numel, group), aligned(buf), out, numel, count, key, shift)

    return Kernels(encode, decode)
