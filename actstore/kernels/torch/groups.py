"""Chunks, groups and stores of codecs of groups, as PyTorch operations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

CHUNK_NUMEL = 1 << 24  # elements at once, a multiple of every group: bounds the float32 temporaries
INF = 0x7F800000


def chunks(numel: int) -> Iterator[tuple[int, int]]:
    """Yield starts and counts of the chunks of a tensor, each encoded at once."""
    for start in range(0, numel, CHUNK_NUMEL):
        yield start, min(CHUNK_NUMEL, numel - start)


def grouped(values: torch.Tensor, group: int) -> torch.Tensor:
    """Reshape a 1-d tensor to (groups, group), the last group filled with zeros."""
    return pad(values, (0, -len(values) % group)).view(-1, group)


def up(values: torch.Tensor) -> torch.Tensor:
    """Round finite float32 numbers of at least 0 up to bfloat16."""
    return ((values.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def rounded(values: torch.Tensor, missing: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 numbers in `dtype`: clamped to its finite range, to even, NaN where `missing`."""
    largest = torch.finfo(dtype).max
    # NaN enters after the conversion, which writes other NaN bits on some processors
    return torch.where(missing, torch.nan, values.clamp(-largest, largest).to(dtype))


def store(values: torch.Tensor, missing: torch.Tensor, out: torch.Tensor) -> None:
    """Write float32 (groups, group) to `out`, 1-d, as `rounded` returns them."""
    out.copy_(rounded(values, missing, out.dtype).view(-1)[: len(out)])
