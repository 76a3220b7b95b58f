"""lz4; csrc/blosc.md."""

from __future__ import annotations

from actstore.codecs import Codec, Int4, Lz4
from tests.oracles import blosc, find

VARIANTS = (Lz4(), Lz4(Int4(), level=9))


def encode(
    data: bytes, dtype: str, inner: Codec, level: int = 1, shuffle: str = "bit", key: int = 0, sizes: find.Sizes = ()
) -> bytes:
    return blosc.encode("lz4", data, dtype, inner, level, shuffle, key, sizes)


def decode(
    payload: bytes,
    numel: int,
    dtype: str,
    inner: Codec,
    level: int = 1,
    shuffle: str = "bit",
    key: int = 0,
    sizes: find.Sizes = (),
) -> bytes:
    return blosc.decode(payload, numel, dtype, inner, key, sizes)
