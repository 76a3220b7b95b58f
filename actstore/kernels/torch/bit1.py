"""bit1 as PyTorch operations, for devices without a kernel. The bytes: csrc/bit1.md."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from actstore.kernels.base import Kernels, payload_pointer, storage_slice
from actstore.kernels.torch.groups import chunks


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for bools. They allocate temporaries and never wait for the device."""
    places = torch.arange(8, dtype=torch.uint8, device=device)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload_pointer(out)
        for start, count in chunks(numel):
            bits = storage_slice(src, start, count).view(torch.uint8).ne(0).to(torch.uint8)
            bytes_ = (pad(bits, (0, -count % 8)).view(-1, 8) << places).sum(1, dtype=torch.uint8)
            out[start // 8 : start // 8 + len(bytes_)] = bytes_

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload_pointer(buf)
        for start, count in chunks(numel):
            bytes_ = buf[start // 8 : (start + count + 7) // 8]
            bits = (bytes_.view(-1, 1) >> places & 1).view(-1)[:count]
            storage_slice(out, start, count).copy_(bits)

    return Kernels(encode, decode)
