"""The part of a saved tensor that backward of some operators depends on. No codecs of the policy text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import torch

from actstore.base.spec import Spec
from actstore.codecs.base import LOSSY_DTYPES, Codec, Exact
from actstore.codecs.bit1 import Bit1
from actstore.codecs.checks import check_buffers, check_dtype
from actstore.errors import PayloadError, SpecError
from actstore.kernels.base import storage_slice

PLANE = Bit1()
BITS = (8, 6, 5, 4, 3, 2)  # of an element of `Levels`


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
        return Exact(PLANE._nbytes(spec.numel, 1))

    def encode(self, src: torch.Tensor, out: torch.Tensor, key: int = 0) -> int:
        nbytes = self.size(Spec.of(src)).nbytes
        check_buffers(self, src, out, nbytes, "encode", SpecError)
        elements = storage_slice(src, 0, src.numel())
        if not self.closed:
            elements = elements.to(torch.float32)  # as these operators compare; shrinking ones compare in their dtype
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
        PLANE.encode(between, out)
        return nbytes

    def decode(self, buf: torch.Tensor, out: torch.Tensor, key: int = 0) -> None:
        check_buffers(self, out, buf, self.size(Spec.of(out)).nbytes, "decode", PayloadError)
        elements = storage_slice(out, 0, out.numel())
        between = torch.empty(out.numel(), dtype=torch.bool, device=out.device)
        PLANE.decode(buf, between)
        elements.fill_(self.outside).masked_fill_(between, self.inside)


@dataclass(frozen=True)
class Levels(Codec):
    """Numbers between two bounds in even steps; of a number outside, only on which side it is.

    Parameters
    ----------
    low, high : the bounds, which are outside themselves; with `curve` exp all numbers up to 0 are inside
    curve : what is rounded: the number (line), or exp(`rate` * number), proportional to the slope of ELU (exp)
    rate : of exp
    bits : 2 to 6 or 8, of an element

    Notes
    -----
    dtypes: float32, float16, bfloat16. Of ``2**bits`` codes one is for each side and one for NaN, so that what is
    rounded is off by at most half of ``(high - low) / (2**bits - 3)``, or of ``1 / (2**bits - 3)``. No scale is stored.
    Codes of 8 bits are bytes; those of fewer lie in planes of one bit of each element, each plane filled up to 16
    bytes. Allocates two float32 numbers and some bytes for each element.
    """

    name = "levels"
    lossless = False

    low: float = -3.0
    high: float = 3.0
    curve: Literal["line", "exp"] = "line"
    rate: float = 1.0
    bits: int = 8

    @property
    def decides(self) -> bool:
        return True

    @property
    def count(self) -> int:
        """Levels between the bounds."""
        return (1 << self.bits) - 3

    def within(self, nbytes: int, numel: int) -> Levels | None:
        """Find the most bits with which `nbytes` hold `numel` elements, planes unfilled; None for fewer than 2."""
        fits = (bits for bits in BITS if bits * numel <= 8 * nbytes)
        bits = next(fits, 0)
        return replace(self, bits=bits) if bits else None

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in LOSSY_DTYPES

    def size(self, spec: Spec) -> Exact:
        check_dtype(self, spec.dtype)
        return Exact(spec.numel if self.bits == 8 else self.bits * _plane_nbytes(spec.numel))

    def encode(self, src: torch.Tensor, out: torch.Tensor, key: int = 0) -> int:
        nbytes = self.size(Spec.of(src)).nbytes
        check_buffers(self, src, out, nbytes, "encode", SpecError)
        elements = storage_slice(src, 0, src.numel()).to(torch.float32)
        if self.curve == "exp":
            levels = elements.mul(self.rate).clamp_(max=0).exp_().mul_(self.count)
        else:
            levels = elements.sub(self.low).mul_(self.count / (self.high - self.low))
        codes = levels.floor_().clamp_(0, self.count - 1).add_(1)
        if self.curve == "exp":
            codes.masked_fill_(elements > 0, self.count + 1)
        else:
            codes.masked_fill_(elements <= self.low, 0).masked_fill_(elements >= self.high, self.count + 1)
        whole = codes.masked_fill_(elements.isnan(), self.count + 2).to(torch.uint8)
        if self.bits == 8:
            out[:nbytes].copy_(whole)
            return nbytes
        step = _plane_nbytes(src.numel())
        for bit in range(self.bits):
            PLANE.encode(whole.bitwise_and(1 << bit).to(torch.bool), out[bit * step : (bit + 1) * step])
        return nbytes

    def decode(self, buf: torch.Tensor, out: torch.Tensor, key: int = 0) -> None:
        nbytes = self.size(Spec.of(out)).nbytes
        check_buffers(self, out, buf, nbytes, "decode", PayloadError)
        numel = out.numel()
        if self.bits == 8:
            codes = buf[:nbytes].to(torch.int32)
        else:
            step, plane = _plane_nbytes(numel), torch.empty(numel, dtype=torch.bool, device=out.device)
            codes = torch.zeros(numel, dtype=torch.int32, device=out.device)
            for bit in range(self.bits):
                PLANE.decode(buf[bit * step : (bit + 1) * step], plane)
                codes |= plane.to(torch.int32) << bit
        storage_slice(out, 0, numel).copy_(self._values(out.device).index_select(0, codes))

    def _values(self, device: torch.device) -> torch.Tensor:
        """List the numbers that codes come back as."""
        middles = (torch.arange(self.count, dtype=torch.float32, device=device) + 0.5) / self.count
        if self.curve == "exp":
            inside, ends = middles.log() / self.rate, (0.0, 1.0)
        else:
            inside, ends = self.low + middles * (self.high - self.low), (self.low - 1, self.high + 1)
        below, above, nan = (inside.new_tensor([value]) for value in (*ends, torch.nan))
        return torch.cat([below, inside, above, nan])


def _plane_nbytes(numel: int) -> int:
    return (PLANE._nbytes(numel, 1) + 15) & -16
