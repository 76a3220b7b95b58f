"""raw as PyTorch operations, for devices without a kernel. The bytes: csrc/raw.md."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, payload_pointer, storage_slice


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for one dtype."""
    itemsize = dtype.itemsize

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload_pointer(out)
        out[: numel * itemsize].copy_(storage_slice(src, 0, numel).view(torch.uint8))

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload_pointer(buf)
        storage_slice(out, 0, numel).view(torch.uint8).copy_(buf[: numel * itemsize])

    return Kernels(encode, decode)
