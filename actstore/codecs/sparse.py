"""Codecs that keep some elements: masks, and the kept ones through an inner codec. The format: csrc/sparse.md."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch

from actstore.codecs.base import LOSSY_DTYPES, Codec, require_leaf
from actstore.codecs.checks import require_choice
from actstore.codecs.dispatch import KernelCodec
from actstore.codecs.raw import Raw
from actstore.errors import ChainError, ConfigError
from actstore.kernels.sparse import TILE, Largest, Rule, SparseSections


class SparseCodec(KernelCodec):
    """The base of zmask, topk and nm, which differ in the rule by which they keep elements."""

    inner: Codec

    def __post_init__(self) -> None:
        require_leaf(self.name, self.inner)
        if not isinstance(self.inner, KernelCodec) or not self.inner._flat:
            reason = "needs whole rows" if isinstance(self.inner, KernelCodec) else "needs to know how many there are"
            raise ChainError(
                f"{self.name} gives its inner codec as many elements as happen to be kept, but {self.inner!r} "
                f"{reason}. Write {self.name}(int8) or {self.name}(raw).",
                inner=self.inner,
            )

    @property
    @abstractmethod
    def _rule(self) -> Rule:
        """The rule by which elements are kept."""

    @property
    def _leaf(self) -> KernelCodec:
        """The inner codec, with the type that `__post_init__` has checked."""
        assert isinstance(self.inner, KernelCodec)
        return self.inner

    @property
    def exact(self) -> bool:
        return self._leaf.exact

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in LOSSY_DTYPES and self.inner.accepts(dtype)

    @property
    def kernel_name(self) -> str:
        return "sparse"

    @property
    def keyed(self) -> bool:
        return self.inner.keyed

    def _options(self) -> dict[str, Any]:
        return {"rule": self._rule, "inner": self.inner}

    def _nbytes(self, numel: int, itemsize: int) -> int:
        if not numel:
            return 0
        rule = self._rule
        kept = numel if rule is None else rule.kept(numel)
        return SparseSections.of(numel).inner + self._leaf._nbytes(kept, itemsize)


NM_GROUPS = (4, 8, 16, 32)


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
        require_choice(self, "m", NM_GROUPS)
        if type(self.n) is not int or not 0 < self.n < self.m:
            raise ConfigError(f"nm(n={self.n!r}, m={self.m}): n must be from 1 to {self.m - 1}.", n=self.n)

    @property
    def _rule(self) -> Largest:
        return Largest(self.m, Fraction(1), self.n)


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
    def _rule(self) -> Largest:
        return Largest(TILE, Fraction(str(self.fraction)), TILE)


ITEMSIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Zmask(SparseCodec):
    """A mask of the elements with a bit that is not zero; `inner` encodes these elements, in their order.

    Parameters
    ----------
    inner : Codec for the elements that are kept, without an inner codec of its own

    Raises
    ------
    ChainError : `inner` cannot stand here

    Notes
    -----
    dtypes: those of `inner` with elements of 1, 2, 4 or 8 bytes. Size: at most 1.0625 bits per element and `inner` of
    all elements; `encode` counts them to find the exact size. Lossless where `inner` is. Otherwise zeros come back as
    +0.0, and the error of the remaining elements is that of `inner`. -0.0 is not zero: it is kept.
    """

    name = "zmask"
    exact = False

    inner: Codec = field(default_factory=Raw)

    @property
    def lossless(self) -> bool:
        return self.inner.lossless

    @cached_property
    def keeping_signs(self) -> Zmask | None:  # computed once
        inner = self.inner.keeping_signs
        return self if inner is self.inner else None if inner is None else Zmask(inner)

    @property
    def _rule(self) -> Rule:
        return None

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize in ITEMSIZES and self.inner.accepts(dtype)
