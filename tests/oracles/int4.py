"""int4; csrc/affine.md."""

from __future__ import annotations

from actstore.codecs import Int4
from tests.oracles import affine

VARIANTS = (
    Int4(),
    *(Int4(group) for group in (64, 128, 256)),
    *(Int4(round=round) for round in ("stochastic", "dither")),  # noqa: A001
    *(Int4(round=round, signs="keep") for round in ("nearest", "stochastic", "dither")),  # noqa: A001
)


def encode(data: bytes, dtype: str, group: int, round: str, key: int = 0, signs: str = "auto") -> bytes:  # noqa: A002
    return affine.encode(data, dtype, 4, group, round, key, signs)


def decode(payload: bytes, numel: int, dtype: str, group: int, round: str, key: int = 0, signs: str = "auto") -> bytes:  # noqa: A002
    return affine.decode(payload, numel, dtype, 4, group, round, key, signs)
