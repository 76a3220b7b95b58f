"""int8 as PyTorch operations, for devices without a kernel. The bytes: csrc/int8.md."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from actstore.kernels.base import Kernels, payload_pointer, storage_slice

CHUNK = 1 << 24  # elements at once: bounds the float32 temporaries
INF = 0x7F800000
FLUSH = 0x08800000  # 2^-110


def kernels(dtype: torch.dtype, device: torch.device, group: int) -> Kernels:
    """Kernels for one dtype and group size. They allocate temporaries and never wait for the device."""

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int) -> None:
        payload_pointer(out)
        start_of_scales = -(-numel // 16) * 16
        out[numel:start_of_scales].zero_()
        codes = out[:numel].view(torch.int8)
        scales = out[start_of_scales : start_of_scales + 2 * -(-numel // group)].view(torch.bfloat16)
        for start in range(0, numel, CHUNK):
            count = min(CHUNK, numel - start)
            chunk = storage_slice(src, start, count)
            first = start // group
            _encode(chunk, codes[start : start + count], scales[first : first - (-count // group)], group)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int) -> None:
        payload_pointer(buf)
        start_of_scales = -(-numel // 16) * 16
        codes = buf[:numel].view(torch.int8)
        scales = buf[start_of_scales : start_of_scales + 2 * -(-numel // group)].view(torch.bfloat16)
        for start in range(0, numel, CHUNK):
            count = min(CHUNK, numel - start)
            chunk = storage_slice(out, start, count)
            first = start // group
            _decode(codes[start : start + count], scales[first : first - (-count // group)], chunk, group)

    return Kernels(encode, decode, dtype.itemsize)


def _encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, group: int) -> None:
    groups = pad(values.to(torch.float32), (0, -len(values) % group)).view(-1, group)
    magnitudes = groups.view(torch.int32) & 0x7FFFFFFF
    finite = magnitudes < INF
    top = torch.where(finite, magnitudes, 0).amax(1, keepdim=True)
    # divides by a tensor: by a number, CUDA would multiply with its reciprocal and lose the last bit
    exact = top.view(torch.float32) / torch.full_like(top, 127, dtype=torch.float32)
    scale = ((exact.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    flushed = top < FLUSH
    quantized = (groups * torch.where(flushed, 0, scale.reciprocal())).round()
    codes.copy_(torch.where(finite, quantized, -128).to(torch.int8).view(-1)[: len(codes)])
    scales.copy_(torch.where(flushed, 0, scale).view(-1))


def _decode(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, group: int) -> None:
    largest = torch.finfo(values.dtype).max
    groups = pad(codes, (0, -len(codes) % group)).view(-1, group)
    decoded = (groups.to(torch.float32) * scales.to(torch.float32).view(-1, 1)).clamp_(-largest, largest)
    # NaN enters after the conversion, which writes other NaN bits on some processors
    values.copy_(decoded.to(values.dtype).masked_fill_(groups == -128, torch.nan).view(-1)[: len(values)])
