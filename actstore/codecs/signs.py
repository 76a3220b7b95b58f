"""The option `signs` of lossy codecs: whether a rounded element keeps its sign."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from actstore.codecs.dispatch import KernelCodec

Signs = Literal["auto", "keep", "round"]
SIGNS: tuple[Signs, ...] = ("auto", "keep", "round")


class SignedCodec(KernelCodec):
    """A lossy codec that can keep zeros, positive and negative elements apart, by its field `signs`."""

    signs: Signs

    @cached_property
    def keeping_signs(self) -> SignedCodec:  # computed once
        options: dict[str, Any] = {"signs": "keep"}
        return replace(self, **options) if self.signs == "auto" else self
