"""int8 as PyTorch operations, for devices without a kernel. The bytes: csrc/int8.md."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, payload_pointer, round_up, storage_slice
from actstore.kernels.torch.groups import INF, chunks, grouped, store
from actstore.kernels.torch.philox import offsets

FLUSH = 0x08800000  # 2^-110
LEAST_SCALE = 0x05000000  # 2^-117, the scale of a group below that where signs are kept


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
            steps = found.to(torch.float32)
            if round == "dither":
                noise = grouped(offsets(start, count, key, out.device), group)
                steps -= torch.where(found == 0, 0, noise) if keep else noise
            values = steps * scales[first:last].to(torch.float32).view(-1, 1)
            store(values, found == -128, storage_slice(out, start, count))

    return Kernels(encode, decode)


def quantize(groups: torch.Tensor, noise: torch.Tensor | None, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int8, and scales of float32 (groups, group), or of (groups, group, columns), a scale per column."""
    magnitudes = groups.view(torch.int32) & 0x7FFFFFFF
    finite = magnitudes < INF
    top = torch.where(finite, magnitudes, 0).amax(1, keepdim=True)
    # divides by a tensor: for a number, CUDA would multiply with its reciprocal and lose the last bit
    exact = top.view(torch.float32) / torch.full_like(top, 127, dtype=torch.float32)
    scale = ((exact.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    flushed = top < FLUSH
    steps = groups * torch.where(flushed, 0, scale.reciprocal())
    if noise is not None:
        steps = steps + noise
    codes = torch.where(finite, steps.round(), -128).to(torch.int8)
    scale = torch.where(flushed, 0, scale)
    if keep:
        codes = torch.where(
            (codes == 0) & (magnitudes != 0), (groups.view(torch.int32) >> 31 | 1).to(torch.int8), codes
        )
        scale = torch.where(flushed & (top != 0), torch.full_like(top, LEAST_SCALE).view(torch.float32), scale)
    return codes, scale.view(-1).to(torch.bfloat16)
