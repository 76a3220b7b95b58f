"""Codecs that keep some elements: masks, and the kept ones through an inner codec. The format: csrc/sparse.md."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from actstore.codecs.base import Codec, require_leaf
from actstore.codecs.dispatch import KernelCodec
from actstore.errors import ChainError
from actstore.kernels.sparse import Rule, SparseSections


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
