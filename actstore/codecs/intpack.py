"""intpack: lossless packing of integers. The format: csrc/intpack.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actstore.codecs.dispatch import KernelCodec
from actstore.kernels.intpack import DTYPES, most_nbytes


@dataclass(frozen=True)
class Intpack(KernelCodec):
    """A codec of integers: the distance to the least of each 1024, in as many bits as the largest distance needs.

    Notes
    -----
    dtypes: int8, int16, int32, int64, uint8, bool. Lossless: `encode` finds the width from the elements themselves.
    Size: those bits and 1/8 bit per element, so at most 1/8 bit above the elements. Token indices below 50,257 take
    16.1 bits, zeros and ones 1.1.
    """

    name = "intpack"
    lossless = True
    exact = False

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    def _nbytes(self, numel: int, itemsize: int) -> int:
        return most_nbytes(numel, itemsize)
