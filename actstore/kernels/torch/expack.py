"""expack as PyTorch operations, for devices without a kernel. The bytes: csrc/expack.md."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, payload_pointer, storage_slice
from actstore.kernels.expack import (
    BASE_AT,
    ESCAPES_AT,
    ESCAPES_BITS,
    OFFSET_BITS,
    SPLITS,
    WIDTH_AT,
    WIDTH_BITS,
    WINDOW_DEPTH,
    ZERO_AT,
    ExpackSections,
    Split,
    altered,
    check,
)
from actstore.kernels.planes import HEADER_NBYTES, PLANE_NBYTES, TILE
from actstore.kernels.torch.planes import chunks, pack_planes, places, tiled, unpack_planes

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_INFINITE_COST = 1 << 40  # more than any cost


class Tiles:
    """Tiles by their descriptors, int64."""

    def __init__(self, descriptors: torch.Tensor, split: Split) -> None:
        self.descriptors = descriptors
        self.split = split
        self.offset = self._field(0, OFFSET_BITS)
        self.base = self._field(BASE_AT, 8)
        self.width = self._field(WIDTH_AT, WIDTH_BITS)
        self.zero = self._field(ZERO_AT, 1)
        self.escapes = self._field(ESCAPES_AT, ESCAPES_BITS)
        self.units = (self.width + split.planes) * (PLANE_NBYTES // 16) + (self.escapes + 15) // 16

    def _field(self, at: int, bits: int) -> torch.Tensor:
        return (self.descriptors >> at) & ((1 << bits) - 1)

    @property
    def _escape(self) -> torch.Tensor:
        """The code of escapes, (tiles, 1); 256, which no code equals, for tiles without escapes."""
        windowed = (self.width > 0) & (self.width < self.split.exponent_bits)
        return torch.where(windowed, (1 << self.width) - 1, 256)[:, None]

    def write(self, parts: torch.Tensor, offsets: torch.Tensor, exponents: torch.Tensor, rest: torch.Tensor) -> None:
        """Write the part of each tile.

        Parameters
        ----------
        offsets : starts of the parts, in bytes
        exponents : (tiles, 1024), -1 after the last element
        rest : (tiles, 1024) of sign and mantissa bits; empty for dtypes without planes
        """
        codes = (exponents - self.base[:, None]) & 255
        is_zero, zeroed = exponents == 0, self.zero[:, None] == 1
        escaped = (codes >= self._escape) | (zeroed & (codes == 0))
        escaped &= (exponents >= 0) & ~(zeroed & is_zero)
        codes = torch.where(escaped, self._escape, torch.where(zeroed & is_zero | (exponents < 0), 0, codes))
        if self.split.planes:
            nbytes = PLANE_NBYTES * self.split.planes
            parts[places(offsets, nbytes)] = pack_planes(rest, self.split.planes)
            offsets = offsets + nbytes
        for width in range(1, self.split.exponent_bits + 1):
            chosen = (self.width == width).nonzero().view(-1)
            parts[places(offsets[chosen], PLANE_NBYTES * width)] = pack_planes(codes[chosen], width)
        offsets = offsets + PLANE_NBYTES * self.width
        tile, element = escaped.nonzero(as_tuple=True)
        padding = places(offsets + self.escapes // 16 * 16, 16)[self.escapes % 16 > 0]
        parts[padding] = 0
        parts[offsets[tile] + escaped.cumsum(1)[tile, element] - 1] = exponents[tile, element].to(torch.uint8)

    def read(self, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read exponents and the rest of sign and mantissa, (tiles, 1024) each.

        Raises
        ------
        PayloadError : the descriptors contradict the codes or the length of the payload
        """
        offsets = 16 * self.offset
        bits = self.split.exponent_bits
        if bool(((self.width > bits) | (offsets + 16 * self.units > len(parts))).any()):
            raise altered()
        rest = exponents = torch.zeros(len(offsets), TILE, dtype=torch.int64, device=parts.device)
        if self.split.planes:
            nbytes = PLANE_NBYTES * self.split.planes
            rest = unpack_planes(parts[places(offsets, nbytes)], self.split.planes)
            offsets = offsets + nbytes
        codes = exponents.clone()
        for width in range(1, bits + 1):
            chosen = (self.width == width).nonzero().view(-1)
            codes[chosen] = unpack_planes(parts[places(offsets[chosen], PLANE_NBYTES * width)], width)
        escaped = codes == self._escape
        if not torch.equal(escaped.sum(1), self.escapes):
            raise altered()
        exponents = torch.where((self.zero[:, None] == 1) & (codes == 0), 0, (codes + self.base[:, None]) & 255)
        offsets = offsets + PLANE_NBYTES * self.width
        tile, element = escaped.nonzero(as_tuple=True)
        places_of = offsets[tile] + escaped.cumsum(1)[tile, element] - 1
        exponents[tile, element] = parts[places_of].to(torch.int64)
        return exponents, rest


def choose(exponents: torch.Tensor, split: Split) -> Tiles:
    """Choose the cheapest windows for exponents (tiles, 1024), -1 after the last element."""
    top = exponents.amax(1)
    below = torch.where(exponents >= 0, top[:, None] - exponents, _INFINITE_COST)
    within = torch.stack([(below < distance).sum(1) for distance in range(WINDOW_DEPTH + 1)], 1)
    count, zeros = (exponents >= 0).sum(1), (exponents == 0).sum(1)
    raw = split.exponent_bits
    # bytes, whether zero has a code, width, distance of the window's end to the top: the first difference decides
    best = torch.full_like(top, raw * PLANE_NBYTES << 16)
    k = torch.arange(WINDOW_DEPTH + 1, device=top.device)
    for zero in (0, 1):
        for width in range(1, split.widest + 1):
            size = (1 << width) - 1 - zero
            ends = k[: WINDOW_DEPTH + 1 - size]
            cost = (width * PLANE_NBYTES + count - zeros * zero)[:, None] - (within[:, size:] - within[:, ends])
            if zero:
                allowed = (top[:, None] - ends >= size) & (zeros > 0)[:, None]
                cost = torch.where(allowed, cost, _INFINITE_COST)
            best = torch.minimum(best, (cost << 16 | zero << 15 | width << 8 | ends).amin(1))
    taken, widths = best >> 16, (best >> 8) & 127
    base = (top - (best & 255) - (1 << widths) + 2) & 255
    escapes = taken - widths * PLANE_NBYTES
    windows = base << BASE_AT | widths << WIDTH_AT | (best >> 15 & 1) << ZERO_AT | escapes << ESCAPES_AT
    windows = torch.where(taken == raw * PLANE_NBYTES, raw << WIDTH_AT, windows)
    return Tiles(torch.where(within[:, 1] == count, top << BASE_AT, windows), split)


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
