"""fp8 as PyTorch operations, for devices without a kernel. The bytes: csrc/fp8.md."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, payload_pointer, round_up, storage_slice
from actstore.kernels.torch.groups import INF, chunks, grouped, store
from actstore.kernels.torch.philox import offsets

FLUSH = 0x0E800000  # 2^-98
EXPONENT = 0x7F800000  # of a float32
LEAST_NORMAL = 0x3C800000  # 2^-6, the least normal e4m3
NOT_FINITE, TOP = 0x7F, 0x7E
LEAST_SCALE = 2.0**-107  # of a group below 2^-98 where signs are kept


def kernels(dtype: torch.dtype, device: torch.device, group: int, scale: str, round: str, keep: bool) -> Kernels:  # noqa: A002
    """Return the kernels for one dtype and set of options. They allocate temporaries and never wait for the device."""
    below = 0xFFFF if scale == "linear" else 0x7FFFFF

    def sections(payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload_pointer(payload)
        return payload[:numel], payload[round_up(numel) :][: 2 * -(-numel // group)].view(torch.bfloat16)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        codes, scales = sections(out, numel)
        out[numel : round_up(numel)].zero_()
        for start, count in chunks(numel):
            first, last = start // group, -(-(start + count) // group)
            values = grouped(storage_slice(src, start, count).to(torch.float32), group)
            noise = None
            if round != "nearest":
                uniform = (offsets(start, count, key, src.device) + 0.498046875) * 256
                noise = grouped(uniform.to(torch.int32), group)
            found, scales[first:last] = _encode(values, noise, below, keep)
            codes[start : start + count] = found.view(-1)[:count]

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        codes, scales = sections(buf, numel)
        for start, count in chunks(numel):
            first, last = start // group, -(-(start + count) // group)
            found = grouped(codes[start : start + count], group)
            values = _values(found) * scales[first:last].to(torch.float32).view(-1, 1)
            store(values, found & 0x7F == NOT_FINITE, storage_slice(out, start, count))

    return Kernels(encode, decode)


def _encode(
    groups: torch.Tensor, noise: torch.Tensor | None, below: int, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, uint8, and scales of float32 (groups, group)."""
    bits = groups.view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF
    finite = magnitudes < INF
    top = torch.where(finite, magnitudes, 0).amax(1, keepdim=True)
    # divides by a tensor: for a number, CUDA would multiply with its reciprocal and lose the last bit
    exact = top.view(torch.float32) / torch.full_like(top, 448, dtype=torch.float32)
    scale = ((exact.view(torch.int32) + below) & ~below).view(torch.float32)
    flushed = top < FLUSH
    scaled = groups.abs() * torch.where(flushed, 0, scale.reciprocal())

    power = torch.where(finite, scaled.view(torch.int32) & EXPONENT, 0).clamp(min=LEAST_NORMAL)
    if noise is None:
        base = power + (20 << 23)
        steps = (scaled + base.view(torch.float32)).view(torch.int32) - base
    else:
        base = power + (4 << 23)
        steps = (scaled + base.view(torch.float32)).view(torch.int32) - base + (noise << 8 | 0x80) >> 16
    codes = (steps + (power - LEAST_NORMAL >> 20)).clamp(max=TOP)
    scale = torch.where(flushed, 0, scale)
    if keep:
        codes = torch.where((codes == 0) & (magnitudes != 0), 1, codes)
        scale = torch.where(flushed & (top != 0), LEAST_SCALE, scale)
    codes = codes | (bits >> 24 & 0x80)
    return torch.where(finite, codes, NOT_FINITE).to(torch.uint8), scale.view(-1).bfloat16()


def _values(codes: torch.Tensor) -> torch.Tensor:
    """Return the values, float32, of e4m3 codes; arbitrary values for NaN."""
    wide = codes.to(torch.int16)
    # the same bits as a float16 are 2^-8 of the value, denormals too
    return ((wide & 0x80) << 8 | (wide & 0x7F) << 7).view(torch.float16).to(torch.float32) * 256
