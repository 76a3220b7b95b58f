"""zmask: a mask of what is not zero, and an inner codec for the rest. The format: csrc/sparse.md."""

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
    """Leaves out elements whose bits are all zero; the others, in their order, go through `inner`.

    Parameters
    ----------
    inner : Codec for the elements that are kept, without an inner codec of its own

    Raises
    ------
    ChainError : `inner` cannot stand here

    Notes
    -----
    dtypes: those of `inner` with elements of 1, 2, 4 or 8 bytes. Size: at most 1.0625 bits per element and `inner` of
    all elements; what it is shows when the elements are counted. Lossless where `inner` is; otherwise what was zero
    comes back as +0.0 and the error of the others is that of `inner`. -0.0 is not zero: it is kept.
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
