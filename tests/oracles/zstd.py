"""zstd; csrc/blosc.md."""

from __future__ import annotations

from actstore.codecs import Codec, Int8, Zmask, Zstd
from tests.oracles import blosc, find

VARIANTS = (
    Zstd(),
    Zstd(level=3, shuffle="none"),
    Zstd(Int8(round="dither", axis="token"), shuffle="bit"),
    Zstd(Zmask()),
)


def encode(
    data: bytes, dtype: str, inner: Codec, level: int = 1, shuffle: str = "byte", key: int = 0, sizes: find.Sizes = ()
) -> bytes:
    return blosc.encode("zstd", data, dtype, inner, level, shuffle, key, sizes)


def decode(
    payload: bytes,
    numel: int,
    dtype: str,
    inner: Codec,
    level: int = 1,
    shuffle: str = "byte",
    key: int = 0,
    sizes: find.Sizes = (),
) -> bytes:
    return blosc.decode(payload, numel, dtype, inner, key, sizes)
