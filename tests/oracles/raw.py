"""raw, written for clarity: bytes in, the same bytes out."""

from __future__ import annotations

from actstore.codecs import Raw

VARIANTS = (Raw(),)


def encode(data: bytes, dtype: str) -> bytes:
    """The payload of elements given as their bytes in storage order."""
    return bytes(data)


def decode(payload: bytes, numel: int, dtype: str) -> bytes:
    """The bytes of `numel` elements."""
    return bytes(payload)
