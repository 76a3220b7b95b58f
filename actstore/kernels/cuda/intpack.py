"""intpack on CUDA devices: csrc/intpack.cu."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels
from actstore.kernels.cuda.planes import plane_kernels

SUFFIX = {
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "u8",
}


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for one dtype on one device."""
    return plane_kernels("intpack", SUFFIX[dtype], device)
