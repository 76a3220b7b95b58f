"""Affine blocks as PyTorch operations, for devices without a kernel. The bytes: csrc/affine.md."""

from __future__ import annotations

import torch

from actstore.kernels.affine import LEVELS, sections, widths
from actstore.kernels.base import Kernels, payload_pointer, storage_slice
from actstore.kernels.torch.groups import INF, chunks, grouped, store
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
            for plane, shift, width in planes:
                packed = _pack(found.view(-1)[:count] >> shift, width)
                plane[start * width // 8 :][: len(packed)] = packed
        for plane, _, width in planes:
            plane[-(-numel * width // 8) :].zero_()

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        planes, scales, minima = _views(buf, numel, bits, group)
        for start, count in chunks(numel):
            first, last = start // group, -(-(start + count) // group)
            codes = torch.zeros(count, dtype=torch.uint8, device=buf.device)
            for plane, shift, width in planes:
                packed = plane[start * width // 8 : -(-(start + count) * width // 8)]
                codes |= _unpack(packed, width)[:count] << shift
            found = grouped(codes, group)
            steps = found.to(torch.float32)
            if bits == 8:
                steps = torch.where(found < 128, steps + 127, steps - 129)
            minimum = minima[first:last].view(-1, 1)
            low, step = _quarter(minimum), _quarter(scales[first:last].view(-1, 1))
            if round == "dither":
                noise = grouped(offsets(start, count, key, out.device), group)
                steps -= torch.where(low + steps * step == 0, 0, noise) if keep else noise
            quarters = low + steps * step
            missing = ((minimum & 0x7FFF) >= 0x7F80) | (found == 128)
            store(quarters * 4, missing, storage_slice(out, start, count))

    return Kernels(encode, decode)


def _views(
    payload: torch.Tensor, numel: int, bits: int, group: int
) -> tuple[list[tuple[torch.Tensor, int, int]], torch.Tensor, torch.Tensor]:
    """Return the planes of codes, each with its first bit and its width; the scales, padded, and the minima."""
    payload_pointer(payload)
    at, (low_bits, high_bits) = sections(numel, bits, group), widths(bits)
    planes = [(payload[: at.upper], 0, low_bits), (payload[at.upper : at.scales], low_bits, high_bits)]
    return (
        planes if high_bits else planes[:1],
        payload[at.scales : at.minima].view(torch.int16),
        payload[at.minima : at.nbytes].view(torch.int16),
    )


def quantize(
    groups: torch.Tensor, noise: torch.Tensor | None, bits: int, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, uint8, and the bits of scales and minima, int16, of float32 (groups, group)."""
    finite = (groups.view(torch.int32) & 0x7FFFFFFF) < INF
    low = torch.where(finite, groups, torch.inf).amin(1, keepdim=True)
    high = torch.where(finite, groups, -torch.inf).amax(1, keepdim=True)
    none = low > high
    minimum = _floor(torch.where(none, 0, low))
    quarter = _quarter(minimum)
    # divides by a tensor: for a number, CUDA would multiply with its reciprocal and lose the last bit
    high_quarter = torch.where(none, 0, high) * 0.25
    spread = high_quarter - quarter
    step = _up(spread / torch.full_like(spread, LEVELS[bits]))
    constant = spread < SMALLEST_QUARTER
    zero = torch.full_like(minimum, -1)
    if keep:
        near = (minimum > 0) & ~constant & (quarter < step)
        at_zero = near | (minimum == 0)
        least = torch.full_like(step, SMALLEST_QUARTER)
        from_zero = _up(high_quarter / torch.full_like(spread, LEVELS[bits]))
        from_zero = torch.where(high_quarter < SMALLEST_QUARTER, least, from_zero)
        below = (low.view(torch.int32) < 0) & (low.view(torch.int32) & 0x7FFFFFFF != 0) & ~none
        around, zero_code = _around_zero(torch.where(none, 0, low) * 0.25, high_quarter, LEVELS[bits], bits)
        step = torch.where(below, around, torch.where(at_zero, from_zero, step))
        zero = torch.where(below, zero_code, torch.where(at_zero, 0, zero))
        empty = (high.view(torch.int32) & 0x7FFFFFFF == 0) | none
        constant = torch.where(below, False, torch.where(at_zero, empty, constant))
        quarter = torch.where(below, -zero_code * around, torch.where(at_zero, 0, quarter))
        minimum = torch.where(below | at_zero, (quarter * 4).view(torch.int32) >> 16, minimum)
    if bits < 8:
        finite = finite.all(1, keepdim=True)
        minimum = torch.where(finite, minimum, NAN)
        constant = constant | ~finite
    steps = (groups * 0.25 - quarter).clamp(min=0) * torch.where(constant, 0, step.reciprocal())
    if noise is not None:
        steps = steps + noise
    steps = steps.round()
    if keep:
        word = groups.view(torch.int32)
        kept = torch.where(word < 0, torch.minimum(steps, zero - 1), torch.maximum(steps, zero + 1))
        steps = torch.where(word & 0x7FFFFFFF == 0, steps, kept)
    codes = torch.where(finite, steps, 255 if bits == 8 else 0).to(torch.uint8)
    if bits == 8:
        codes = codes + 129
    scale = torch.where(constant, 0, (step * 4).view(torch.int32) >> 16)
    return codes, scale.view(-1).to(torch.int16), minimum.view(-1).to(torch.int16)


def _up(values: torch.Tensor) -> torch.Tensor:
    """Round finite float32 numbers of at least 0 up to bfloat16."""
    return ((values.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def _around_zero(low: torch.Tensor, high: torch.Tensor, levels: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find a quarter of the step of groups with negative elements, and their code of zero, from quarters of bounds."""
    low = low.clamp(min=-LARGEST_QUARTER)
    step, zero = torch.full_like(low, torch.inf), torch.ones_like(low)
    for power in range(bits):
        code = 1 << power
        found = _up(torch.maximum(low * (-1 / code), high / torch.full_like(high, levels - code)))
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


def _quarter(bits: torch.Tensor) -> torch.Tensor:
    """Return a quarter of bfloat16 numbers given by their bits."""
    return (bits.to(torch.int32) << 16).view(torch.float32) * 0.25


def _pack(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Pack the low bits of 1-d uint8 side by side into bytes, the first ones lowest."""
    if width == 8:
        return codes
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    return (grouped(codes & ((1 << width) - 1), 8 // width) << shifts).sum(1, dtype=torch.uint8)


def _unpack(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Unpack the bytes of `_pack`."""
    if width == 8:
        return packed
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) >> shifts & ((1 << width) - 1)).view(-1)
