"""Codes of a few bits side by side in bytes, along the last dimension."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

BYTE = 8  # bits
COPIES = 0x0101010101010101  # times a byte: the same in all eight bytes
BITS_OF_BYTES = 0x8040201008040201 - (1 << 64)  # in each byte another bit, the lowest first


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


def spread_bits(joined: Tensor) -> Tensor:
    """Return what `join_bits` has joined of single bits as bools, the fill too.

    On a CPU eight of them are one product, and compared as float32, which loops of Inductor do many at once.
    """
    if joined.device.type != "cpu" or sys.byteorder != "little":
        return split_bits(joined, 1).to(torch.bool)
    flat = joined.reshape(-1)  # of one dimension: Inductor turns some of four, and a view of bytes needs them in order
    eight = (flat.to(torch.int64) * COPIES) & BITS_OF_BYTES
    bits = eight.view(torch.uint8).reshape(*joined.shape[:-1], BYTE * joined.shape[-1])
    return bits.to(torch.float32) != 0


def split_bits(joined: Tensor, width: int) -> Tensor:
    """Split what `join_bits` has joined, the fill too."""
    if width == BYTE:
        return joined
    mask = (1 << width) - 1
    return torch.stack([(joined >> place) & mask for place in range(0, BYTE, width)], -1).flatten(-2)
