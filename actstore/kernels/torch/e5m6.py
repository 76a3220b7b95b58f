"""e5m6 as PyTorch operations, for devices without a kernel. The bytes: csrc/e5m6.md."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from actstore.kernels.base import Kernels, payload_pointer, round_up, storage_slice
from actstore.kernels.torch.groups import INF, chunks

EXPONENT = 0x7F800000  # of a float32
LEAST_NORMAL = 0x38800000  # 2^-14, the least normal e5m6
OVERFLOW = 0x47800000  # 2^16: the code of Inf follows that of 65024


def kernels(dtype: torch.dtype, device: torch.device, keep: bool) -> Kernels:
    """Return the kernels for one dtype. They allocate temporaries and never wait for the device."""

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload_pointer(out)
        out[numel : round_up(numel)].zero_()
        low = out[round_up(numel) :]
        for start, count in chunks(numel):
            codes = _codes(storage_slice(src, start, count).to(torch.float32), keep)
            out[start : start + count] = codes >> 4
            pairs = pad(codes & 15, (0, count % 2)).view(-1, 2)
            low[start // 2 :][: len(pairs)] = pairs[:, 0] | pairs[:, 1] << 4

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        payload_pointer(buf)
        low = buf[round_up(numel) :]
        for start, count in chunks(numel):
            both = low[start // 2 :][: (count + 1) // 2]
            nibbles = torch.stack([both & 15, both >> 4], 1).view(-1)[:count].to(torch.int32)
            halves = (
                (buf[start : start + count].to(torch.int32) << 8 | nibbles << 4).to(torch.int16).view(torch.float16)
            )
            # NaN enters after the conversion, which writes other NaN bits on some processors
            storage_slice(out, start, count).copy_(halves.to(dtype).masked_fill_(halves.isnan(), torch.nan))

    return Kernels(encode, decode)


def _codes(values: torch.Tensor, keep: bool) -> torch.Tensor:
    """Return the codes, int32, of float32 values."""
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    near = magnitude.clamp(max=OVERFLOW)
    power = (near & EXPONENT).clamp(min=LEAST_NORMAL)
    base = power + (17 << 23)
    steps = (near.view(torch.float32) + base.view(torch.float32)).view(torch.int32) - base
    codes = steps + (power - LEAST_NORMAL >> 17)
    if keep:
        codes = torch.where((codes == 0) & (magnitude != 0), 1, codes)
    codes = codes | bits >> 20 & 0x800
    return codes.masked_fill_(magnitude > INF, 0x7E0)
