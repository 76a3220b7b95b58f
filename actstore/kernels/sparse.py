"""The sections of a sparse payload, and the number of kept elements: csrc/sparse.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from actstore.errors import PayloadError
from actstore.kernels.base import Inner, round_up

HEADER_NBYTES = 16  # the length and the number of kept elements
TILE = 1024  # elements; the payload stores the number of kept elements before each tile
PERIOD = 16 * TILE  # elements: every group of every codec and every 16 bytes of their codes end here together


class SparseSections(NamedTuple):
    """The starts of the sections of a payload; the header starts at 0."""

    masks: int
    starts: int
    inner: int

    @classmethod
    def of(cls, numel: int) -> SparseSections:
        starts = HEADER_NBYTES + round_up(4 * -(-numel // 32))
        return cls(HEADER_NBYTES, starts, starts + round_up(8 * -(-numel // TILE)))


@dataclass(frozen=True)
class Largest:
    """The rule to keep, of every `row` consecutive elements, those of the largest magnitude.

    Of a row of `size` elements, the last one may be short, it keeps ``min(most, ceil(share * size))``.
    """

    row: int
    share: Fraction
    most: int

    def of(self, size: int) -> int:
        return min(self.most, math.ceil(self.share * size))

    def kept(self, numel: int) -> int:
        return numel // self.row * self.of(self.row) + self.of(numel % self.row)


Rule = Largest | None  # None: all elements but those whose bits are all zero


def check_header(nbytes: int, header: tuple[int, int], numel: int, itemsize: int, rule: Rule, inner: Inner) -> None:
    """Check the length and the count of a payload in a buffer of `nbytes`.

    Raises
    ------
    PayloadError : `encode` does not write such values, or the buffer is shorter
    """
    length, count = header
    head = SparseSections.of(numel).inner
    most = numel if rule is None else rule.kept(numel)
    if (0 if rule is None else most) <= count <= most:
        longest = head + (inner._nbytes(count, itemsize) if count else 0)
        if (longest if inner.exact else head) <= length <= longest:
            if length <= nbytes:
                return
            raise PayloadError(f"a sparse payload ends after {nbytes} bytes: must have {length}.", nbytes=nbytes)
    raise PayloadError(
        f"a sparse payload of {numel} elements claims {count} kept ones and {length} bytes, which no encoder writes.",
        nbytes=length,
    )


class Growth(NamedTuple):
    """``nbytes(n) == n // PERIOD * step + table[n % PERIOD]``: a size that a device can compute."""

    step: int
    table: list[int]

    @classmethod
    def of(cls, nbytes: Callable[[int], int]) -> Growth:
        """Make the table of a codec's payload size by number of elements."""
        return cls(nbytes(PERIOD), [nbytes(numel) for numel in range(PERIOD)])
