"""nm: the n largest magnitudes of every m elements through an inner codec. The format: csrc/sparse.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import torch

from actstore.codecs.base import LOSSY_DTYPES, Codec
from actstore.codecs.checks import require_choice
from actstore.codecs.raw import Raw
from actstore.codecs.sparse import SparseCodec
from actstore.errors import ConfigError
from actstore.kernels.sparse import Largest

GROUPS = (4, 8, 16, 32)


@dataclass(frozen=True)
class Nm(SparseCodec):
    """The `n` largest magnitudes of every `m` consecutive elements; the remaining elements come back as 0.

    Parameters
    ----------
    n : elements kept, 1 to ``m - 1``; a short last group of ``s`` elements keeps ``min(n, s)``
    m : 4, 8, 16 or 32
    inner : Codec for the elements that are kept, without an inner codec of its own

    Raises
    ------
    ConfigError : another `n` or `m`
    ChainError : `inner` cannot stand here

    Notes
    -----
    dtypes: float32, float16, bfloat16 where `inner` takes them. 1.0625 bits per element and `inner` of `n` in `m`.
    Biased: the dropped elements are small, but do not average to zero; meant for experiments. Of equal magnitudes the
    first is kept; NaN and Inf are larger than all finite ones. The error of a kept element is that of `inner`. That of
    a dropped element is its magnitude, which is at most that of each kept element of the group.
    """

    name = "nm"
    lossless = False

    n: int = 2
    m: int = 4
    inner: Codec = field(default_factory=Raw)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, "m", GROUPS)
        if type(self.n) is not int or not 0 < self.n < self.m:
            raise ConfigError(f"nm(n={self.n!r}, m={self.m}): n must be from 1 to {self.m - 1}.", n=self.n)

    @property
    def exact(self) -> bool:
        return self._leaf.exact

    @property
    def _rule(self) -> Largest:
        return Largest(self.m, Fraction(1), self.n)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in LOSSY_DTYPES and self.inner.accepts(dtype)
