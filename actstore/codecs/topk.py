"""topk: the largest magnitudes of each tile through an inner codec, zero for the rest. The format: csrc/sparse.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import torch

from actstore.codecs.base import LOSSY_DTYPES, Codec
from actstore.codecs.raw import Raw
from actstore.codecs.sparse import SparseCodec
from actstore.errors import ConfigError
from actstore.kernels.sparse import TILE, Largest


@dataclass(frozen=True)
class Topk(SparseCodec):
    """The largest magnitudes of every 1024 consecutive elements; the remaining elements come back as 0.

    Parameters
    ----------
    fraction : the share that is kept, above 0 and at most 1; of `s` elements ``ceil(fraction * s)``, with the fraction
        read as a decimal number
    inner : Codec for the elements that are kept, without an inner codec of its own

    Raises
    ------
    ConfigError : another fraction
    ChainError : `inner` cannot stand here

    Notes
    -----
    dtypes: float32, float16, bfloat16 where `inner` takes them. 1.0625 bits per element and `inner` of the share.
    Biased: the dropped elements are small, but do not average to zero; meant for experiments. Of equal magnitudes the
    first is kept; NaN and Inf are larger than all finite ones. The error of a kept element is that of `inner`. That of
    a dropped element is its magnitude, which is at most that of each kept element of the tile.
    """

    name = "topk"
    lossless = False

    fraction: float = 0.25
    inner: Codec = field(default_factory=Raw)

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.fraction) not in (int, float) or not 0 < self.fraction <= 1:
            raise ConfigError(
                f"topk(fraction={self.fraction!r}): must be above 0 and at most 1, such as 0.25.",
                fraction=self.fraction,
            )

    @property
    def exact(self) -> bool:
        return self._leaf.exact

    @property
    def _rule(self) -> Largest:
        return Largest(TILE, Fraction(str(self.fraction)), TILE)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in LOSSY_DTYPES and self.inner.accepts(dtype)
