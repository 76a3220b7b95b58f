"""intpack as PyTorch operations, for devices without a kernel. The bytes: csrc/intpack.md."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, payload_pointer, storage_slice
from actstore.kernels.intpack import OFFSET_AT, altered, check, parts_of
from actstore.kernels.planes import HEADER_NBYTES, PLANE_NBYTES, TILE
from actstore.kernels.torch.planes import chunks, pack_planes, places, tiled, unpack_planes


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for one dtype. They allocate temporaries and wait for the device."""
    stored = torch.uint8 if dtype is torch.bool else dtype

    def sections(payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the descriptors, a row for each tile, and of the parts of the tiles."""
        payload_pointer(payload)
        parts = parts_of(numel)
        return payload[HEADER_NBYTES:parts].view(torch.int64).view(-1, 2), payload[parts:]

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> int:
        descriptors, parts = sections(out, numel)
        length = 0
        for start, count in chunks(numel):
            elements = storage_slice(src, start, count).view(stored).to(torch.int64)
            tiles = tiled(elements, 0)
            tiles.view(-1)[count:] = elements[-1]  # changes neither the least nor the largest
            least = tiles.amin(1, keepdim=True)
            codes = tiles - least
            codes.view(-1)[count:] = 0
            widths = _bit_length(tiles.amax(1) - least.view(-1))
            units = widths * (PLANE_NBYTES // 16)
            offsets = units.cumsum(0) - units + length // 16
            rows = descriptors[start // TILE :][: len(tiles)]
            rows[:, 0], rows[:, 1] = least.view(-1), widths | offsets << OFFSET_AT
            for width, chosen in _by_width(widths):
                parts[places(16 * offsets[chosen], PLANE_NBYTES * width)] = pack_planes(codes[chosen], width)
            length += 16 * int(units.sum())
        length += parts_of(numel)
        out[:HEADER_NBYTES] = torch.tensor([length, numel], device=out.device).view(torch.uint8)
        return length

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int) -> None:
        descriptors, parts = sections(buf[: check(buf, numel, dtype.itemsize)], numel)
        widths, offsets = descriptors[:, 1] & 255, (descriptors[:, 1] >> OFFSET_AT & (1 << 56) - 1) * 16
        if bool(((widths > 8 * dtype.itemsize) | (offsets + PLANE_NBYTES * widths > len(parts))).any()):
            raise altered()
        for start, count in chunks(numel):
            rows = slice(start // TILE, -(-(start + count) // TILE))
            tiles = descriptors[rows, :1].repeat(1, TILE)
            for width, chosen in _by_width(widths[rows]):
                found = parts[places(offsets[rows][chosen], PLANE_NBYTES * width)]
                tiles[chosen] += unpack_planes(found, width)
            storage_slice(out, start, count).view(stored).copy_(tiles.view(-1)[:count])

    return Kernels(encode, decode)


def _bit_length(numbers: torch.Tensor) -> torch.Tensor:
    """Count the bits that int64 numbers need, read as unsigned."""
    needed = torch.where(numbers < 0, 64, 0)
    for bit in range(63):
        needed = torch.where((numbers >> bit) > 0, bit + 1, needed)
    return needed


def _by_width(widths: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """List the widths of tiles, but for 0, each with the indices of its tiles."""
    return [(width, (widths == width).nonzero().view(-1)) for width in widths.unique().tolist() if width]
