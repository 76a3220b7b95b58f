"""int3; csrc/affine.md."""

from __future__ import annotations

from actstore.codecs import Int3
from tests.oracles import affine

VARIANTS = (
    Int3(),
    Int3(64, "stochastic"),
    Int3(128, "dither"),
    Int3(256),
    Int3(signs="keep"),
    Int3(64, "stochastic", "keep"),
    Int3(128, "dither", "keep"),
)


def encode(data: bytes, dtype: str, group: int, round: str, key: int = 0, signs: str = "auto") -> bytes:  # noqa: A002
    return affine.encode(data, dtype, 3, group, round, key, signs)


def decode(payload: bytes, numel: int, dtype: str, group: int, round: str, key: int = 0, signs: str = "auto") -> bytes:  # noqa: A002
    return affine.decode(payload, numel, dtype, 3, group, round, key, signs)
