"""int8 as PyTorch operations, for devices without a kernel. The bytes: csrc/int8.md."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, payload_pointer, round_up, storage_slice
from actstore.kernels.torch.groups import chunks, grouped, rounded, up
from actstore.kernels.torch.philox import offsets

FLUSH = 2.0**-110
LEAST_SCALE = 2.0**-117  # the scale of a group below that where signs are kept


def kernels(dtype: torch.dtype, device: torch.device, group: int, round: str, keep: bool) -> Kernels:  # noqa: A002
    """Return the kernels for one dtype and set of options. They allocate temporaries and never wait for the device."""

    def sections(payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload_pointer(payload)
        scales = payload[round_up(numel) :][: 2 * -(-numel // group)].view(torch.bfloat16)
        return payload[:numel].view(torch.int8), scales

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        codes, scales = sections(out, numel)
        out[numel : round_up(numel)].zero_()
        for start, count in chunks(numel):
            first, last = start // group, -(-(start + count) // group)
            values = grouped(storage_slice(src, start, count).to(torch.float32), group)
            noise = None if round == "nearest" else grouped(offsets(start, count, key, src.device), group)
            found, scales[first:last] = quantize(values, noise, keep)
            codes[start : start + count] = found.view(-1)[:count]

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        codes, scales = sections(buf, numel)
        for start, count in chunks(numel):
            first, last = start // group, -(-(start + count) // group)
            found = grouped(codes[start : start + count], group)
            noise = grouped(offsets(start, count, key, out.device), group) if round == "dither" else None
            values = dequantize(found, scales[first:last].view(-1, 1), out.dtype, noise, keep)
            storage_slice(out, start, count).copy_(values.view(-1)[:count])

    return Kernels(encode, decode)


def quantize(
    groups: torch.Tensor, noise: torch.Tensor | None, keep: bool, dim: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int8, and scales, bfloat16, of float32 groups along `dim`; scales lack that dimension."""
    magnitudes = groups.abs()
    finite = magnitudes < torch.inf
    top = torch.where(finite, magnitudes, 0).amax(dim, keepdim=True)
    # divides by a tensor: for a number, CUDA would multiply with its reciprocal and lose the last bit
    scale = up(top / torch.full_like(top, 127))
    flushed = top < FLUSH
    steps = groups * torch.where(flushed, 0, scale.reciprocal())
    if noise is not None:
        steps = steps + noise
    steps = steps.round()
    scale = torch.where(flushed, 0, scale)
    if keep:
        steps = torch.where(steps == 0, groups.sign(), steps)
        scale = torch.where(flushed & (top != 0), LEAST_SCALE, scale)
    codes = torch.where(finite, steps, -128).to(torch.int8)
    return codes, scale.squeeze(dim).to(torch.bfloat16)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, noise: torch.Tensor | None, keep: bool
) -> torch.Tensor:
    """Return the elements of codes, in `dtype`; `scales` have the dimensions of `codes`, the grouped one of size 1."""
    steps = codes.to(torch.float32)
    missing = steps == -128  # loops of Inductor compare float32 faster than int8
    if noise is not None:
        steps = steps - (torch.where(steps == 0, 0, noise) if keep else noise)
    return rounded(steps * scales.to(torch.float32), missing, dtype)
