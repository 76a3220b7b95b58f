"""Affine blocks as PyTorch operations, for devices without a kernel. The bytes: csrc/affine.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actstore.kernels.affine import LEVELS, sections, widths
from actstore.kernels.base import Kernels, payload_pointer, storage_slice
from actstore.kernels.torch.bits import pack_codes, unpack_codes
from actstore.kernels.torch.groups import chunks, grouped, rounded, up
from actstore.kernels.torch.philox import offsets

SMALLEST_MINIMUM = 0x08800000  # 2^-110
SMALLEST_QUARTER = 2.0**-82
LARGEST_QUARTER = (2 - 2.0**-7) * 2.0**125  # of the largest bfloat16
LARGEST = 0x7F7F0000  # of bfloat16
NAN = 0x7FC0


def kernels(
    dtype: torch.dtype,
    device: torch.device,
    bits: int,
    group: int,
    round: str,  # noqa: A002
    keep: bool,
) -> Kernels:
    """Return the kernels for one dtype and set of options. They allocate temporaries and never wait for the device."""

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        planes, scales, minima = _views(out, numel, bits, group)
        scales[len(minima) :].zero_()
        for start, count in chunks(numel):
            first, last = start // group, -(-(start + count) // group)
            values = storage_slice(src, start, count).to(torch.float32)
            values = torch.cat([values, values[-1:].expand(-count % group)]).view(-1, group)
            noise = None if round == "nearest" else grouped(offsets(start, count, key, src.device), group)
            found, scales[first:last], minima[first:last] = quantize(values, noise, bits, keep)
            for (plane, width), packed in zip(planes, pack_planes(found.view(-1)[:count], bits), strict=True):
                plane[start * width // 8 :][: len(packed)] = packed
        for plane, width in planes:
            plane[-(-numel * width // 8) :].zero_()

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        planes, scales, minima = _views(buf, numel, bits, group)
        for start, count in chunks(numel):
            first, last = start // group, -(-(start + count) // group)
            packed = [plane[start * width // 8 : -(-(start + count) * width // 8)] for plane, width in planes]
            codes = grouped(unpack_planes(packed, bits, count), group)
            noise = grouped(offsets(start, count, key, out.device), group) if round == "dither" else None
            scale, minimum = scales[first:last].view(-1, 1), minima[first:last].view(-1, 1)
            values = dequantize(codes, scale, minimum, bits, out.dtype, noise, keep)
            storage_slice(out, start, count).copy_(values.view(-1)[:count])

    return Kernels(encode, decode)


def _views(
    payload: torch.Tensor, numel: int, bits: int, group: int
) -> tuple[list[tuple[torch.Tensor, int]], torch.Tensor, torch.Tensor]:
    """Return the planes of codes, each with its width; the scales, padded, and the minima."""
    payload_pointer(payload)
    at, (low_bits, high_bits) = sections(numel, bits, group), widths(bits)
    planes = [(payload[: at.upper], low_bits), (payload[at.upper : at.scales], high_bits)]
    return (
        planes if high_bits else planes[:1],
        payload[at.scales : at.minima].view(torch.bfloat16),
        payload[at.minima : at.nbytes].view(torch.bfloat16),
    )


def quantize(
    groups: torch.Tensor, noise: torch.Tensor | None, bits: int, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, uint8, and scales and minima, bfloat16, of float32 (..., groups, group)."""
    finite = groups.abs() < torch.inf
    low = torch.where(finite, groups, torch.inf).amin(-1, keepdim=True)
    high = torch.where(finite, groups, -torch.inf).amax(-1, keepdim=True)
    none = low > high
    minimum = _floor(torch.where(none, 0, low))
    quarter = (minimum << 16).view(torch.float32) * 0.25
    # divides by a tensor: for a number, CUDA would multiply with its reciprocal and lose the last bit
    high_quarter = torch.where(none, 0, high) * 0.25
    spread = high_quarter - quarter
    step = up(spread / torch.full_like(spread, LEVELS[bits]))
    constant = spread < SMALLEST_QUARTER
    zero = torch.full_like(minimum, -1)
    if keep:
        near = (minimum > 0) & ~constant & (quarter < step)
        at_zero = near | (minimum == 0)
        least = torch.full_like(step, SMALLEST_QUARTER)
        from_zero = up(high_quarter / torch.full_like(spread, LEVELS[bits]))
        from_zero = torch.where(high_quarter < SMALLEST_QUARTER, least, from_zero)
        below = low < 0
        around, zero_code = _around_zero(torch.where(none, 0, low) * 0.25, high_quarter, LEVELS[bits], bits)
        step = torch.where(below, around, torch.where(at_zero, from_zero, step))
        zero = torch.where(below, zero_code, torch.where(at_zero, 0, zero))
        empty = (high == 0) | none
        constant = torch.where(below, False, torch.where(at_zero, empty, constant))
        quarter = torch.where(below, -zero_code * around, torch.where(at_zero, 0, quarter))
        minimum = torch.where(below | at_zero, (quarter * 4).view(torch.int32) >> 16, minimum)
    if bits < 8:
        finite = finite.all(-1, keepdim=True)
        minimum = torch.where(finite, minimum, NAN)
        constant = constant | ~finite
    steps = (groups * 0.25 - quarter).clamp(min=0) * torch.where(constant, 0, step.reciprocal())
    if noise is not None:
        steps = steps + noise
    steps = steps.round()
    if keep:
        above = torch.where(groups > 0, torch.maximum(steps, zero + 1), steps)
        steps = torch.where(groups < 0, torch.minimum(steps, zero - 1), above)
    codes = torch.where(finite, steps, 255 if bits == 8 else 0).to(torch.uint8)
    if bits == 8:
        codes = codes + 129
    scale = torch.where(constant, 0, (step * 4).view(torch.int32) >> 16)
    return codes, _bfloat16(scale), _bfloat16(minimum)


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor,
    bits: int,
    dtype: torch.dtype,
    noise: torch.Tensor | None,
    keep: bool,
) -> torch.Tensor:
    """Return the elements of codes (..., groups, group), in `dtype`; scales and minima are (..., groups, 1)."""
    steps = codes.to(torch.float32)  # loops of Inductor compare float32 faster than int8
    low, step = (each.to(torch.float32) * 0.25 for each in (minima, scales))
    missing = ~low.isfinite()
    if bits == 8:
        missing = missing | (steps == 128)
        steps = torch.where(steps < 128, steps + 127, steps - 129)
    if noise is not None:
        steps = steps - (torch.where(low + steps * step == 0, 0, noise) if keep else noise)
    return rounded((low + steps * step) * 4, missing, dtype)


def _bfloat16(bits: torch.Tensor) -> torch.Tensor:
    """Return the numbers of int32 bits (..., groups, 1), without the last dimension."""
    return bits.squeeze(-1).to(torch.int16).view(torch.bfloat16)


def _around_zero(low: torch.Tensor, high: torch.Tensor, levels: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find a quarter of the step of groups with negative elements, and their code of zero, from quarters of bounds."""
    low = low.clamp(min=-LARGEST_QUARTER)
    step, zero = torch.full_like(low, torch.inf), torch.ones_like(low)
    for power in range(bits):
        code = 1 << power
        found = up(torch.maximum(low * (-1 / code), high / torch.full_like(high, levels - code)))
        found = found.clamp(min=SMALLEST_QUARTER)
        better = (found < step) & (found <= LARGEST_QUARTER / code)
        step, zero = torch.where(better, found, step), torch.where(better, code, zero)
    return step, zero


def _floor(values: torch.Tensor) -> torch.Tensor:
    """Round finite float32 numbers down to bfloat16, as bits, int32; 0 for tiny ones, the lowest for those below it."""
    word = values.view(torch.int32)
    magnitude = word & 0x7FFFFFFF
    down = torch.where(word < 0, (magnitude + 0xFFFF).clamp(max=LARGEST) | ~0x7FFFFFFF, word)
    return torch.where(magnitude < SMALLEST_MINIMUM, 0, down) >> 16


def pack_planes(codes: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Return the planes of uint8 codes along the last dimension, the lowest bits first."""
    low, high = widths(bits)
    return [pack_codes(codes, low), *([pack_codes(codes >> low, high)] if high else [])]


def unpack_planes(planes: Sequence[torch.Tensor], bits: int, numel: int) -> torch.Tensor:
    """Return `numel` codes of planes along the last dimension."""
    low, high = widths(bits)
    codes = unpack_codes(planes[0], low)[..., :numel]
    return codes if not high else codes | unpack_codes(planes[1], high)[..., :numel] << low
