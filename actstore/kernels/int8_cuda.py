"""int8 on CUDA devices: csrc/int8.cu."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, payload_pointer
from actstore.kernels.launch import THREADS, launcher

OWNED = 32  # elements per thread, in csrc/int8.cu
SUFFIX = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def log2_lanes(group: int) -> int:
    """Threads that share a group, as a power of two."""
    return (group // OWNED).bit_length() - 1


def blocks(numel: int, group: int) -> int:
    """Blocks of a launch."""
    return -(-(-(-numel // group) * group // OWNED) // THREADS)


def kernels(dtype: torch.dtype, device: torch.device, group: int) -> Kernels:
    """Kernels for one dtype and group size on one device."""
    run_encode = launcher("int8", f"int8_encode_{SUFFIX[dtype]}", device)
    run_decode = launcher("int8", f"int8_decode_{SUFFIX[dtype]}", device)
    shift = log2_lanes(group)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int) -> None:
        run_encode(blocks(numel, group), src.data_ptr(), payload_pointer(out), numel, shift)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int) -> None:
        run_decode(blocks(numel, group), payload_pointer(buf), out.data_ptr(), numel, shift)

    return Kernels(encode, decode, dtype.itemsize)
