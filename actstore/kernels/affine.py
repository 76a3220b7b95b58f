"""The sections of a payload of affine blocks, for all kernels. The bytes: csrc/affine.md."""

from __future__ import annotations

from typing import NamedTuple

from actstore.kernels.base import round_up
from actstore.kernels.rows import Format

LEVELS = {8: 254, 6: 63, 5: 31, 4: 15, 3: 7, 2: 3}  # the top code, by bits


class AffineSections(NamedTuple):
    """The starts of the second plane of codes, of the scales and of the minima, and the end of the payload."""

    upper: int
    scales: int
    minima: int
    nbytes: int


def widths(bits: int) -> tuple[int, int]:
    """Split the `bits` of a code: the number in the first plane, a power of two, and the number in the second."""
    low = 1 << (bits.bit_length() - 1)
    return low, bits - low


def affine_format(bits: int) -> Format:
    """Return the sections of a payload: one or two planes of codes, scales and minima."""
    return Format(tuple(width for width in widths(bits) if width), (2, 2))


def sections(numel: int, bits: int, group: int) -> AffineSections:
    """Return the sections of the payload of `numel` elements; the first plane of codes starts at 0."""
    low, high = widths(bits)
    groups = -(-numel // group)
    upper = round_up(-(-numel * low // 8))
    scales = upper + round_up(-(-numel * high // 8))
    minima = scales + round_up(2 * groups)
    return AffineSections(upper, scales, minima, minima + 2 * groups)
