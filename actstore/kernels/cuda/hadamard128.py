"""hadamard128 on CUDA devices: csrc/hadamard128.cu."""

from __future__ import annotations

from importlib import import_module

import torch

from actstore.kernels.base import Inner, Kernels
from actstore.kernels.cuda import launch
from actstore.kernels.cuda.groups import SUFFIX, group_blocks
from actstore.kernels.hadamard128 import ROTATION_NUMEL, around

IN_ONE_PASS = ("affine", "fp8", "int8", "nf4")  # kernels that also have a source csrc/hadamard128_*.cu


def kernels(dtype: torch.dtype, device: torch.device, inner: Inner) -> Kernels:
    """Return the kernels for one dtype on one device, around those of the inner codec."""
    options = inner._options()
    if inner.kernel_name in IN_ONE_PASS and options.get("layout") != "bnb":
        module = import_module(f"actstore.kernels.cuda.{inner.kernel_name}")
        both: Kernels = module.kernels(dtype, device, **options, prefix="hadamard128_")
        return both
    run_forward, run_inverse = (
        launch.launcher("hadamard128", f"hadamard128_{way}_{SUFFIX[dtype]}", device) for way in ("forward", "inverse")
    )

    def forward(src: torch.Tensor, scratch: torch.Tensor, numel: int, key: int) -> None:
        run_forward(group_blocks(numel, ROTATION_NUMEL), src, scratch, numel, key)

    def inverse(scratch: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        run_inverse(group_blocks(numel, ROTATION_NUMEL), scratch, out, numel, key)

    return around(inner.kernels("cuda", torch.float32, device), device, forward, inverse)
