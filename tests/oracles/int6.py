"""int6; csrc/affine.md."""

from __future__ import annotations

from actstore.codecs import Int6
from tests.oracles import affine

VARIANTS = (
    Int6(),
    Int6(64, "stochastic"),
    Int6(128, "dither"),
    Int6(256),
    Int6(signs="keep"),
    Int6(64, "stochastic", "keep"),
    Int6(128, "dither", "keep"),
)


def encode(data: bytes, dtype: str, group: int, round: str, key: int = 0, signs: str = "auto") -> bytes:  # noqa: A002
    return affine.encode(data, dtype, 6, group, round, key, signs)


def decode(payload: bytes, numel: int, dtype: str, group: int, round: str, key: int = 0, signs: str = "auto") -> bytes:  # noqa: A002
    return affine.decode(payload, numel, dtype, 6, group, round, key, signs)
