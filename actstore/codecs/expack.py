"""expack: lossless packing of exponents. The format: csrc/expack.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actstore.codecs.dispatch import KernelCodec
from actstore.kernels.expack import SPLITS, most_nbytes


@dataclass(frozen=True)
class Expack(KernelCodec):
    """A codec of floats: sign and mantissa as they are, exponents in as many bits as each 1024 elements need.

    Notes
    -----
    dtypes: float32, float16, bfloat16. Lossless: every bit pattern comes back, NaN payloads and -0.0 too. Size:
    Gaussian elements in bfloat16 come to 11.3 bits, in float16 to 14.3, in float32 to 27.3; outputs of GELU or softmax
    and elements with many magnitudes to up to one bit more; nothing to more than 1/16 bit above the elements.
    """

    name = "expack"
    lossless = True
    exact = False

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in SPLITS

    def _nbytes(self, numel: int, itemsize: int) -> int:
        return most_nbytes(numel, itemsize)
