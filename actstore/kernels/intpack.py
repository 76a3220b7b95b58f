"""The sections of an intpack payload: csrc/intpack.md."""

from __future__ import annotations

import torch

from actstore.errors import PayloadError
from actstore.kernels.planes import HEADER_NBYTES, PLANE_NBYTES, TILE, check_header

DESCRIPTOR_NBYTES = 16  # the least element of a tile, then offset and width
OFFSET_AT = 8  # of the second word, whose lowest bits are the width

DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


def parts_of(numel: int) -> int:
    """Return the start of the parts of the tiles."""
    return HEADER_NBYTES + DESCRIPTOR_NBYTES * -(-numel // TILE)


def most_nbytes(numel: int, itemsize: int) -> int:
    """Return the bytes of a payload whose tiles do not compress."""
    return parts_of(numel) + 8 * itemsize * PLANE_NBYTES * -(-numel // TILE) if numel else 0


def check(payload: torch.Tensor, numel: int, itemsize: int) -> int:
    """Check the header of a payload, and return its length.

    Raises
    ------
    PayloadError : the payload is cut, or not of `numel` elements
    """
    return check_header("intpack", payload, numel, parts_of(numel), most_nbytes(numel, itemsize))


def altered() -> PayloadError:
    return PayloadError("a payload of intpack was altered: its descriptors and its length contradict each other.")
