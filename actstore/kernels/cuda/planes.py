"""Launches of codecs of tiles of bit planes: csrc/planes.cuh."""

from __future__ import annotations

import torch

from actstore.kernels.base import Kernels, aligned
from actstore.kernels.cuda import launch
from actstore.kernels.planes import TILE

CHUNK_TILES = 1024  # tiles whose lengths one block adds


def plane_kernels(name: str, suffix: str, device: torch.device) -> Kernels:
    """Return the kernels of ``csrc/<name>.cu``, which measure all tiles, add their lengths, and write the tiles."""
    measure, add, place, write, read = (
        launch.launcher(name, f"{name}_{part}_{suffix}", device)
        for part in ("measure", "add", "place", "write", "decode")
    )

    def encode(src: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        blocks, chunks = tile_blocks(numel), -(-numel // (TILE * CHUNK_TILES))
        measure(blocks, src, aligned(out), numel, count)
        add(chunks, out, numel, count)
        place(chunks, out, numel, count)
        write(blocks, src, out, numel, count)

    def decode(buf: torch.Tensor, out: torch.Tensor, numel: int, key: int, count: torch.Tensor | None = None) -> None:
        read(tile_blocks(numel), aligned(buf), out, numel, count)

    return Kernels(encode, decode)


def tile_blocks(numel: int) -> int:
    """Count the blocks of a launch with a warp for each tile."""
    return -(-numel // (TILE * launch.THREADS // 32))
