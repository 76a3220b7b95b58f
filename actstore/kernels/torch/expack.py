"""expack as PyTorch operations, for devices without a kernel. The bytes: csrc/expack.md."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, payload_pointer, storage_slice
from actstore.kernels.expack import SPLITS, ExpackSections, check
from actstore.kernels.planes import HEADER_NBYTES, TILE
from actstore.kernels.torch.expack_tiles import Tiles, choose
from actstore.kernels.torch.planes import chunks, tiled

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for one dtype. They allocate temporaries and wait for the device."""
    split, itemsize = SPLITS[dtype], dtype.itemsize

    def sections(payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, ...]:
        """Return views of the descriptors, low halves, bytes and the parts of the tiles."""
        payload_pointer(payload)
        at = ExpackSections.of(numel, itemsize)
        descriptors = payload[at.descriptors :][: 8 * -(-numel // TILE)].view(torch.int64)
        halves = payload[at.halves :][: 2 * numel].view(torch.int16) if itemsize == 4 else payload[:0]
        return descriptors, halves, payload[at.bytes :][:numel], payload[at.tiles :]

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> int:
        descriptors, halves, low, parts = sections(out, numel)
        length = ExpackSections.of(numel, itemsize).tiles
        out[:length].zero_()
        for start, count in chunks(numel):
            elements = storage_slice(src, start, count).view(BITS[dtype]).to(torch.int64)
            if itemsize == 4:
                halves[start : start + count] = elements.to(torch.int16)
                elements >>= 16
            exponents, found, rest = _split_half(elements) if split.planes else _split(elements)
            low[start : start + count] = found.to(torch.uint8)
            exponents = tiled(exponents, -1)
            tiles = choose(exponents, split)
            units = tiles.units
            offsets = units.cumsum(0) - units + (length - len(out) + len(parts)) // 16
            descriptors[start // TILE :][: len(units)] = tiles.descriptors | offsets
            tiles.write(parts, 16 * offsets, exponents, tiled(rest, 0))
            length += 16 * int(units.sum())
        out[:HEADER_NBYTES] = torch.tensor([length, numel], device=out.device).view(torch.uint8)
        return length

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        descriptors, halves, low, parts = sections(buf[: check(buf, numel, itemsize)], numel)
        for start, count in chunks(numel):
            tiles = Tiles(descriptors[start // TILE :][: -(-count // TILE)], split)
            found = low[start : start + count].to(torch.int64)
            exponents, rest = (part.view(-1)[:count] for part in tiles.read(parts))
            elements = _join_half(exponents, found, rest) if split.planes else _join(exponents, found)
            if itemsize == 4:
                elements = elements << 16 | halves[start : start + count].to(torch.int64) & 0xFFFF
            storage_slice(out, start, count).view(BITS[dtype]).copy_(elements)

    return Kernels(encode, decode)


def _split(upper: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the upper halves of float32, or bfloat16, into exponents, bytes of sign and mantissa, and an empty rest."""
    return (upper >> 7) & 255, upper & 0x7F | (upper >> 8) & 0x80, upper[:0]


def _join(exponents: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return low & 0x7F | (low & 0x80) << 8 | exponents << 7


def _split_half(elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split float16 into exponents, low bytes, and the rest of sign and mantissa."""
    return (elements >> 10) & 31, elements & 0xFF, (elements >> 8) & 3 | (elements >> 13) & 4


def _join_half(exponents: torch.Tensor, low: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    return low | (rest & 3) << 8 | (rest & 4) << 13 | (exponents & 31) << 10
