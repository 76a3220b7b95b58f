"""int2; csrc/affine.md."""

from __future__ import annotations

from actstore.codecs import Int2
from tests.oracles import affine

VARIANTS = (
    Int2(),
    Int2(round="dither"),
    Int2(64, "dither"),
    *(Int2(group) for group in (128, 256)),
    *(Int2(round=round, signs="keep") for round in ("stochastic", "dither")),  # noqa: A001
)


def encode(data: bytes, dtype: str, group: int, round: str, key: int = 0, signs: str = "auto") -> bytes:  # noqa: A002
    return affine.encode(data, dtype, 2, group, round, key, signs)


def decode(payload: bytes, numel: int, dtype: str, group: int, round: str, key: int = 0, signs: str = "auto") -> bytes:  # noqa: A002
    return affine.decode(payload, numel, dtype, 2, group, round, key, signs)
