"""e5m6: 12-bit floats. The format: csrc/e5m6.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actstore.codecs.dispatch import KernelCodec
from actstore.codecs.int8 import DTYPES
from actstore.kernels.base import round_up


@dataclass(frozen=True)
class E5m6(KernelCodec):
    """Floats of 5 exponent and 6 mantissa bits: float16 without its last 4 bits, two elements in three bytes.

    Notes
    -----
    dtypes: float32, float16, bfloat16. 12 bits per element, no scale.
    ``|x - decode(encode(x))| <= max(|x| / 128, 2**-21)`` for ``|x| < 65280``; from there on a finite value becomes Inf,
    so that what does not fit is seen. NaN, Inf and -0.0 stay what they are.
    """

    name = "e5m6"
    lossless = False

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    def _nbytes(self, numel: int, itemsize: int) -> int:
        return round_up(numel) + (numel + 1) // 2
