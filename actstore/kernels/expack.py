"""Where the sections of an expack payload stand, and what its numbers mean: csrc/expack.md."""

from __future__ import annotations

from typing import NamedTuple

import torch

from actstore.errors import PayloadError
from actstore.kernels.base import round_up
from actstore.kernels.planes import HEADER_NBYTES, PLANE_NBYTES, TILE, check_header

FAR = 31  # exponents this much below the largest of their tile, or more, are in no window

OFFSET_BITS = 40  # of a descriptor: offset, base, width, whether there is a code for zero, escapes
BASE_AT, WIDTH_AT, ZERO_AT, ESCAPES_AT = 40, 48, 52, 53
WIDTH_BITS, ESCAPES_BITS = 4, 11


class Split(NamedTuple):
    """How the bits of an element are parted."""

    exponent_bits: int
    planes: int  # of sign and mantissa bits that are in no byte

    @property
    def widest(self) -> int:
        """The most bits of a code in a window."""
        return min(5, self.exponent_bits - 1)


SPLITS = {torch.float32: Split(8, 0), torch.bfloat16: Split(8, 0), torch.float16: Split(5, 3)}


class ExpackSections(NamedTuple):
    """Where the sections of the payload of `numel` elements start; the header starts at 0."""

    descriptors: int
    halves: int
    bytes: int
    tiles: int

    @classmethod
    def of(cls, numel: int, itemsize: int) -> ExpackSections:
        halves = HEADER_NBYTES + round_up(8 * -(-numel // TILE))
        low_bytes = halves + (round_up(2 * numel) if itemsize == 4 else 0)
        return cls(HEADER_NBYTES, halves, low_bytes, low_bytes + round_up(numel))


def most_nbytes(numel: int, itemsize: int) -> int:
    """The bytes of the payload where no tile can be made shorter."""
    return ExpackSections.of(numel, itemsize).tiles + 8 * PLANE_NBYTES * -(-numel // TILE) if numel else 0


def check(payload: torch.Tensor, numel: int, itemsize: int) -> int:
    """The length of a payload, once its header is checked.

    Raises
    ------
    PayloadError : it is cut, or not of `numel` elements
    """
    return check_header(
        "expack", payload, numel, ExpackSections.of(numel, itemsize).tiles, most_nbytes(numel, itemsize)
    )


def altered() -> PayloadError:
    return PayloadError("a payload of expack was altered: its descriptors, codes and length contradict each other")
