"""The header of payloads of tiles of bit planes."""

from __future__ import annotations

import torch

from actstore.errors import PayloadError

HEADER_NBYTES = 16  # the length and the number of elements
TILE = 1024  # elements under one descriptor
PLANE_NBYTES = TILE // 8


def check_header(codec: str, payload: torch.Tensor, numel: int, least: int, most: int) -> int:
    """Check the header of a payload, and return its length.

    Parameters
    ----------
    least, most : bounds of the bytes of a payload of `numel` elements

    Raises
    ------
    PayloadError : the payload is cut, or not of `numel` elements
    """
    if payload.numel() < HEADER_NBYTES:
        raise PayloadError(f"a payload of {codec} ends after {payload.numel()} bytes, in its header.")
    length, count = payload[:HEADER_NBYTES].clone().view(torch.int64).tolist()
    if count != numel or not least <= length <= most:
        raise PayloadError(
            f"a payload of {codec} has {length} bytes for {count} elements: must have {least} to {most} bytes for "
            f"{numel} elements.",
            numel=numel,
        )
    if length > payload.numel():
        raise PayloadError(
            f"a payload of {codec} ends after {payload.numel()} bytes: must have {length}.",
            nbytes=payload.numel(),
            needed=length,
        )
    return int(length)
