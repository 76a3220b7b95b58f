"""What all kernels of affine blocks share: where the sections of a payload start. The bytes: csrc/affine.md."""

from __future__ import annotations

from typing import NamedTuple

from actstore.kernels.base import round_up

LEVELS = {8: 254, 4: 15, 2: 3}  # the top code, by bits


class Sections(NamedTuple):
    """Where the scales and the minima start, and where the payload ends."""

    scales: int
    minima: int
    nbytes: int


def sections(numel: int, bits: int, group: int) -> Sections:
    """The sections of the payload of `numel` elements; the codes start at 0."""
    groups = -(-numel // group)
    scales = round_up(-(-numel * bits // 8))
    minima = scales + round_up(2 * groups)
    return Sections(scales, minima, minima + 2 * groups)
