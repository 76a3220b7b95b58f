"""zmask: a mask of the elements that are not zero, and an inner codec for those. The format: csrc/sparse.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from actstore.codecs.base import Codec
from actstore.codecs.raw import Raw
from actstore.codecs.sparse import SparseCodec
from actstore.kernels.sparse import Rule

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
