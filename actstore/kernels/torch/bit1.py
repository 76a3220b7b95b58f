"""bit1 as PyTorch operations, for devices without a kernel. The bytes: csrc/bit1.md."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, payload_pointer, storage_slice
from actstore.kernels.torch.bits import pack_bools, unpack_bools
from actstore.kernels.torch.groups import chunks


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for bools. They allocate temporaries and never wait for the device."""

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload_pointer(out)
        for start, count in chunks(numel):
            packed = pack_bools(storage_slice(src, start, count).view(torch.uint8).ne(0))
            out[start // 8 : start // 8 + len(packed)] = packed

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload_pointer(buf)
        for start, count in chunks(numel):
            bools = unpack_bools(buf[start // 8 : (start + count + 7) // 8])
            storage_slice(out, start, count).copy_(bools[:count])

    return Kernels(encode, decode)
