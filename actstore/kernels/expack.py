"""The sections of an expack payload, and the fields of its descriptors: csrc/expack.md."""

from __future__ import annotations

from typing import NamedTuple

import torch

from actstore.errors import PayloadError
from actstore.kernels.base import round_up
from actstore.kernels.planes import HEADER_NBYTES, PLANE_NBYTES, TILE, check_header

WINDOW_DEPTH = 31  # exponents this much below the largest of their tile, or more, are in no window

OFFSET_BITS = 40  # fields of a descriptor: offset, base, width, whether zero has a code, number of escapes
BASE_AT, WIDTH_AT, ZERO_AT, ESCAPES_AT = 40, 48, 52, 53
WIDTH_BITS, ESCAPES_BITS = 4, 11


class Split(NamedTuple):
    """The split of an element's bits into exponent, a byte, and planes."""

    exponent_bits: int
    planes: int  # of sign and mantissa bits that are in no byte

    @property
    def widest(self) -> int:
        """The most bits of a code in a window."""
        return min(5, self.exponent_bits - 1)


SPLITS = {torch.float32: Split(8, 0), torch.bfloat16: Split(8, 0), torch.float16: Split(5, 3)}


class ExpackSections(NamedTuple):
    """The starts of the sections of a payload; the header starts at 0."""

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
    """Return the bytes of a payload whose tiles do not compress."""
    return ExpackSections.of(numel, itemsize).tiles + 8 * PLANE_NBYTES * -(-numel // TILE) if numel else 0


def check(payload: torch.Tensor, numel: int, itemsize: int) -> int:
    """Check the header of a payload, and return its length.

    Raises
    ------
    PayloadError : the payload is cut, or not of `numel` elements
    """
    return check_header(
        "expack", payload, numel, ExpackSections.of(numel, itemsize).tiles, most_nbytes(numel, itemsize)
    )


def altered() -> PayloadError:
    return PayloadError("a payload of expack was altered: its descriptors, codes and length contradict each other.")
