"""int5; csrc/affine.md."""

from __future__ import annotations

from actstore.codecs import Int5
from tests.oracles import affine

VARIANTS = (
    Int5(),
    Int5(64, "stochastic"),
    Int5(128, "dither"),
    Int5(256),
    Int5(signs="keep"),
    Int5(64, "stochastic", "keep"),
    Int5(128, "dither", "keep"),
)


def encode(data: bytes, dtype: str, group: int, round: str, key: int = 0, signs: str = "auto") -> bytes:  # noqa: A002
    return affine.encode(data, dtype, 5, group, round, key, signs)


def decode(payload: bytes, numel: int, dtype: str, group: int, round: str, key: int = 0, signs: str = "auto") -> bytes:  # noqa: A002
    return affine.decode(payload, numel, dtype, 5, group, round, key, signs)
