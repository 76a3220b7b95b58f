"""bit1: bools as bits. The format: csrc/bit1.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actstore.codecs.dispatch import KernelCodec


@dataclass(frozen=True)
class Bit1(KernelCodec):
    """A codec of bool tensors: one bit per element.

    Notes
    -----
    dtypes: bool. 1 bit per element, lossless. An element whose byte is neither 0 nor 1, which PyTorch does not write,
    counts as true and comes back as 1.
    """

    name = "bit1"
    lossless = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bool

    def _nbytes(self, numel: int, itemsize: int) -> int:
        return (numel + 7) // 8
