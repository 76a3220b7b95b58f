"""Codes of a few bits side by side in bytes, along the last dimension."""

from __future__ import annotations

import sys

import torch

BYTE = 8  # bits
COPIES = 0x0101010101010101  # times a byte: the same in all eight bytes
BITS_OF_BYTES = 0x8040201008040201 - (1 << 64)  # in each byte another bit, the lowest first
GATHER = 0x0102040810204080  # times eight bytes of 0 or 1: the highest byte has them as bits, the first one lowest


def pack_codes(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Pack the low `width` bits of uint8 codes, the first one lowest; the last byte is filled with zeros."""
    if width == BYTE:
        return codes
    count = BYTE // width
    codes = _filled(codes & ((1 << width) - 1), count).unflatten(-1, (-1, count))
    packed = codes[..., 0]
    for place in range(1, count):
        packed = packed | (codes[..., place] << (place * width))
    return packed


def pack_bools(bools: torch.Tensor) -> torch.Tensor:
    """Pack bools as `pack_codes` packs single bits.

    On a CPU loops of Inductor write a bool byte by byte; bytes of a float32 they write many at once, and eight of those
    are one product.
    """
    if not _has_words(bools):
        return pack_codes(bools.to(torch.uint8), 1)
    filled = _filled(bools.to(torch.float32).to(torch.uint8), BYTE)
    eight = filled.reshape(-1).view(torch.int64)
    return ((eight * GATHER) >> 56).to(torch.uint8).reshape(*filled.shape[:-1], filled.shape[-1] // BYTE)


def unpack_bools(packed: torch.Tensor) -> torch.Tensor:
    """Return the bools that `pack_bools` has packed, with the fill.

    On a CPU eight of them are one product, and compared as float32, which loops of Inductor do many at once.
    """
    if not _has_words(packed):
        return unpack_codes(packed, 1).to(torch.bool)
    flat = packed.reshape(-1)  # of one dimension: Inductor turns some of four, and a view of bytes needs them in order
    eight = (flat.to(torch.int64) * COPIES) & BITS_OF_BYTES
    bits = eight.view(torch.uint8).reshape(*packed.shape[:-1], BYTE * packed.shape[-1])
    return bits.to(torch.float32) != 0


def unpack_codes(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Return the codes that `pack_codes` has packed, with the fill."""
    if width == BYTE:
        return packed
    mask = (1 << width) - 1
    return torch.stack([(packed >> place) & mask for place in range(0, BYTE, width)], -1).flatten(-2)


def _has_words(tensor: torch.Tensor) -> bool:
    """Return whether to take eight bytes for a number: on a CPU whose lowest byte is the first one."""
    return tensor.device.type == "cpu" and sys.byteorder == "little"


def _filled(codes: torch.Tensor, count: int) -> torch.Tensor:
    """Return codes with zeros at the end of each row, to a multiple of `count`."""
    fill = -codes.shape[-1] % count
    return torch.nn.functional.pad(codes, (0, fill)) if fill else codes
