"""Bit planes of tiles of 1024 numbers as PyTorch operations, and parts of a payload by offset."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from actstore.kernels.planes import PLANE_NBYTES, TILE

CHUNK_NUMEL = 1 << 22  # elements at once: bounds the 64-bit temporaries


def chunks(numel: int) -> Iterator[tuple[int, int]]:
    """Yield starts and counts of the chunks of a tensor, each encoded at once: whole tiles, but for the last."""
    for start in range(0, numel, CHUNK_NUMEL):
        yield start, min(CHUNK_NUMEL, numel - start)


def tiled(values: torch.Tensor, fill: int) -> torch.Tensor:
    """Reshape a 1-d tensor to (tiles, 1024), the last tile padded with `fill`."""
    return pad(values, (0, -len(values) % TILE), value=fill).view(-1, TILE)


def pack_planes(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """Pack the low bits of integers (tiles, 1024) into planes, as bytes (tiles, 128 * width)."""
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=numbers.device)
    planes = [((numbers >> b) & 1).to(torch.uint8).view(-1, PLANE_NBYTES, 8) * weights for b in range(width)]
    return torch.cat([plane.sum(2, dtype=torch.uint8) for plane in planes], 1)


def unpack_planes(planes: torch.Tensor, width: int) -> torch.Tensor:
    """Unpack the planes of `pack_planes`: int64 (tiles, 1024)."""
    shifts = torch.arange(8, dtype=torch.uint8, device=planes.device)
    numbers = torch.zeros(len(planes), TILE, dtype=torch.int64, device=planes.device)
    for b in range(width):
        plane = planes[:, b * PLANE_NBYTES : (b + 1) * PLANE_NBYTES, None]
        numbers |= ((plane >> shifts) & 1).view(-1, TILE).to(torch.int64) << b
    return numbers


def places(offsets: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the indices of the `nbytes` bytes after each offset, in bytes."""
    return offsets[:, None] + torch.arange(nbytes, device=offsets.device)
