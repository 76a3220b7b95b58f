"""raw: the bytes themselves. The format: csrc/raw.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actstore.codecs.base import Bound
from actstore.codecs.dispatch import KernelCodec


@dataclass(frozen=True)
class Raw(KernelCodec):
    """The bytes of the dense region, unchanged; any dtype."""

    name = "raw"
    lossless = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return True

    def _nbytes(self, numel: int, itemsize: int) -> int:
        return numel * itemsize

    def bind(self, src: torch.Tensor) -> Bound:
        return super().bind(src)._replace(as_is=True)
