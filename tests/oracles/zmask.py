"""zmask, one element after another; csrc/sparse.md in Python."""

from __future__ import annotations

from actstore.codecs import Codec, Int8, Zmask
from tests.oracles import sparse

VARIANTS = (Zmask(), Zmask(Int8(32, round="dither")))


def encode(data: bytes, dtype: str, inner: Codec, key: int = 0) -> bytes:
    elements = sparse.split(data, dtype)
    return sparse.encode(elements, [any(element) for element in elements], dtype, inner, key)


def decode(payload: bytes, numel: int, dtype: str, inner: Codec, key: int = 0) -> bytes:
    return sparse.decode(payload, numel, dtype, inner, key)
