"""Codes of a few bits side by side in bytes, along the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

BYTE = 8  # bits


def join_bits(codes: Tensor, width: int) -> Tensor:
    """Join the low `width` bits of uint8 codes, the first one lowest; the last byte is filled with zeros."""
    if width == BYTE:
        return codes
    count = BYTE // width
    codes = codes & ((1 << width) - 1)
    if fill := -codes.shape[-1] % count:
        codes = torch.nn.functional.pad(codes, (0, fill))
    codes = codes.unflatten(-1, (-1, count))
    joined = codes[..., 0]
    for place in range(1, count):
        joined = joined | (codes[..., place] << (place * width))
    return joined


def split_bits(joined: Tensor, width: int) -> Tensor:
    """Split what `join_bits` has joined, the fill too."""
    if width == BYTE:
        return joined
    mask = (1 << width) - 1
    return torch.stack([(joined >> place) & mask for place in range(0, BYTE, width)], -1).flatten(-2)
