"""expack on CUDA devices: csrc/expack.cu."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels
from actstore.kernels.cuda.groups import SUFFIX
from actstore.kernels.cuda.planes import plane_kernels


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for one dtype on one device."""
    return plane_kernels("expack", SUFFIX[dtype], device)
