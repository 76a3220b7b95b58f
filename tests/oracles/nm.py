"""nm, one group at a time; csrc/sparse.md in Python."""

from __future__ import annotations

from actstore.codecs import Codec, Int8, Nm
from tests.oracles import sparse

VARIANTS = (Nm(), Nm(5, 8), Nm(1, 16, Int8(64)), Nm(9, 32))


def encode(data: bytes, dtype: str, n: int, m: int, inner: Codec, key: int = 0) -> bytes:
    elements, kept = sparse.split(data, dtype), []
    for start in range(0, len(elements), m):
        kept += sparse.largest(elements[start : start + m], n)
    return sparse.encode(elements, kept, dtype, inner, key)


def decode(payload: bytes, numel: int, dtype: str, n: int, m: int, inner: Codec, key: int = 0) -> bytes:
    return sparse.decode(payload, numel, dtype, inner, key)
