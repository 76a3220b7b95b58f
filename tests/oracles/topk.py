"""topk, one tile at a time; csrc/sparse.md in Python."""

from __future__ import annotations

import math
from decimal import Decimal

from actstore.codecs import Codec, Int8, Topk
from tests.oracles import sparse

VARIANTS = (Topk(), Topk(0.1, Int8(round="stochastic")))


def encode(data: bytes, dtype: str, fraction: float, inner: Codec, key: int = 0) -> bytes:
    elements, kept = sparse.split(data, dtype), []
    for start in range(0, len(elements), 1024):
        tile = elements[start : start + 1024]
        kept += sparse.largest(tile, math.ceil(Decimal(str(fraction)) * len(tile)))
    return sparse.encode(elements, kept, dtype, inner, key)


def decode(payload: bytes, numel: int, dtype: str, fraction: float, inner: Codec, key: int = 0) -> bytes:
    return sparse.decode(payload, numel, dtype, inner, key)
