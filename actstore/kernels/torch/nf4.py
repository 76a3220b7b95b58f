"""nf4 as PyTorch operations, for devices without a kernel. The bytes: csrc/nf4.md."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, payload_pointer, round_up, storage_slice
from actstore.kernels.nf4 import BNB_LEAST, BOUNDS, FLUSH, LARGEST, NAN, VALUES, ZERO
from actstore.kernels.torch.groups import INF, chunks, grouped, store


def kernels(dtype: torch.dtype, device: torch.device, group: int, layout: str, keep: bool) -> Kernels:
    """Return the kernels for one dtype and set of options. They allocate temporaries and never wait for the device."""
    bnb = layout == "bnb"
    bounds, values = (torch.tensor(numbers, dtype=torch.float32, device=device) for numbers in (BOUNDS, VALUES))

    def sections(payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        payload_pointer(payload)
        nbytes = (numel + 1) // 2
        bits = torch.int32 if bnb else torch.int16
        return payload[:nbytes], payload[round_up(nbytes) :][: bits.itemsize * -(-numel // group)].view(bits)

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        packed, absmaxes = sections(out, numel)
        out[len(packed) : round_up(len(packed))].zero_()
        for start, count in chunks(numel):
            elements = storage_slice(src, start, count).to(torch.float32)
            groups = grouped(elements, group)
            tops = (groups.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)
            if bnb:
                scaled, found = _scale_bnb(groups, tops, count // group)
            else:
                scaled, found = _scale(groups, tops, FLUSH >> 16 if keep else 0)
            absmaxes[start // group : -(-(start + count) // group)] = found.view(-1)
            # groups with NaN or Inf decode to NaN by their absmax
            codes = torch.bucketize(scaled, bounds, out_int32=True)
            if keep:
                word = groups.view(torch.int32)
                kept = torch.where(word < 0, codes.clamp(max=ZERO - 1), codes.clamp(min=ZERO + 1))
                codes = torch.where(word & 0x7FFFFFFF == 0, codes, kept)
            codes = codes.masked_fill_(tops >= INF, ZERO).to(torch.uint8)
            pairs = codes.view(-1, 2)[: (count + 1) // 2]
            one, other = (pairs[:, 1], pairs[:, 0]) if bnb else (pairs[:, 0], pairs[:, 1])
            packed[start // 2 : start // 2 + len(pairs)] = one | other << 4

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        packed, absmaxes = sections(buf, numel)
        for start, count in chunks(numel):
            pairs = packed[start // 2 : (start + count + 1) // 2]
            ways = (pairs >> 4, pairs & 15) if bnb else (pairs & 15, pairs >> 4)
            codes = grouped(torch.stack(ways, 1).view(-1)[:count].to(torch.int32), group)
            bits = absmaxes[start // group : -(-(start + count) // group)].to(torch.int32).view(-1, 1)
            absmax = (bits if bnb else bits << 16).view(torch.float32)
            small = absmax.view(torch.int32) < FLUSH
            found = values[codes] * absmax.masked_fill(small, 0)
            store(found, absmax.isnan().expand_as(found), storage_slice(out, start, count))

    return Kernels(encode, decode)


def _scale(groups: torch.Tensor, tops: torch.Tensor, least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return elements in units of the absmax of their group, and its bits, `least` where they are too small.

    `tops` are the bits of the largest magnitudes.
    """
    small = tops < FLUSH
    bits = (tops.clamp(max=INF) + 0xFFFF >> 16).clamp(max=LARGEST)
    absmax = (bits << 16).view(torch.float32)
    # divides a tensor: for a number, torch would multiply with a reciprocal
    factor = (torch.full_like(absmax, 4) / absmax).masked_fill(small, 0)
    bits = bits.masked_fill(small, least).masked_fill(tops == 0, 0).masked_fill(tops >= INF, NAN >> 16)
    return groups * factor / 4, bits.to(torch.int16)


def _scale_bnb(groups: torch.Tensor, tops: torch.Tensor, whole: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same in the layout of bitsandbytes, for `whole` groups and a last one that may be short."""
    least = tops.clamp(min=BNB_LEAST)
    divisors = least.view(torch.float32)
    scaled = torch.cat([groups[:whole] * divisors[:whole].reciprocal(), groups[whole:] / divisors[whole:]])
    return scaled, torch.cat([tops[:whole], least[whole:]]).masked_fill(tops >= INF, NAN)
