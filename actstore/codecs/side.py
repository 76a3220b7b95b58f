"""One bit per element: all that the backward of some operators needs of their saved tensors. Not in the policy text."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from actstore.base.spec import Spec
from actstore.codecs.base import LOSSY_DTYPES, Codec, Exact
from actstore.codecs.bit1 import Bit1
from actstore.codecs.checks import check_buffers, check_dtype
from actstore.errors import PayloadError, SpecError
from actstore.kernels.base import storage_slice

BITS = Bit1()


@dataclass(frozen=True)
class Side(Codec):
    """One bit per element, set between two bounds, for operators whose backward only compares elements with them.

    Parameters
    ----------
    low, high : the bounds; `high` may be infinity
    nan : whether NaN counts as between them
    closed : whether the bounds themselves count as between them

    Notes
    -----
    dtypes: float32, float16, bfloat16. 1 bit per element. It comes back as `inside` or `outside`, on its side of
    the bounds, so that such a backward gives the same gradient bit for bit. For NaN, PyTorch's own result
    depends on the position of the element for some operators. Allocates a byte for each element, and a float32 number
    for each element of 16 bits.
    """

    name = "side"
    lossless = False

    low: float
    high: float
    nan: bool = True
    closed: bool = False

    @property
    def inside(self) -> float:
        """A number between the bounds."""
        return self.low + 1 + abs(self.low) if self.high == inf else (self.low + self.high) / 2

    @property
    def outside(self) -> float:
        """A number beyond the bounds, so far that no dtype rounds it to one of them."""
        return self.low - 1 - abs(self.low) if self.high == inf else self.high + 1 + abs(self.high)

    @property
    def decides(self) -> bool:
        return True

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in LOSSY_DTYPES

    def size(self, spec: Spec) -> Exact:
        check_dtype(self, spec.dtype)
        return Exact(BITS._nbytes(spec.numel, 1))

    def encode(self, src: torch.Tensor, out: torch.Tensor, key: int = 0) -> int:
        nbytes = self.size(Spec.of(src)).nbytes
        check_buffers(self, src, out, nbytes, "encode", SpecError)
        elements = storage_slice(src, 0, src.numel())
        if not self.closed:
            elements = elements.to(
                torch.float32
            )  # in which these operators compare; shrinking ones compare in their dtype
        if self.closed:
            between = (elements >= self.low) & (elements <= self.high)
        elif self.nan:
            between = (elements <= self.low).logical_not_()
            if self.high != inf:
                between &= (elements >= self.high).logical_not_()
        else:
            between = elements > self.low
            if self.high != inf:
                between &= elements < self.high
        BITS.encode(between, out)
        return nbytes

    def decode(self, buf: torch.Tensor, out: torch.Tensor, key: int = 0) -> None:
        check_buffers(self, out, buf, self.size(Spec.of(out)).nbytes, "decode", PayloadError)
        elements = storage_slice(out, 0, out.numel())
        between = torch.empty(out.numel(), dtype=torch.bool, device=out.device)
        BITS.decode(buf, between)
        elements.fill_(self.outside).masked_fill_(between, self.inside)
