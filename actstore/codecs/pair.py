"""Tensors of two values, such as masks of dropout: one bit per element. No codec of the policy text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from actstore.base.layout import layout_of
from actstore.base.spec import Spec
from actstore.codecs.base import Codec, Exact
from actstore.codecs.bit1 import Bit1
from actstore.codecs.checks import check_buffers, check_dtype
from actstore.errors import PayloadError, SpecError
from actstore.kernels.base import storage_slice

PLANE = Bit1()
INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
HEAD_COUNT = 32  # elements that are looked at first


@dataclass(frozen=True)
class Pair(Codec):
    """A codec of tensors whose elements are one of two values: which of them, as the payload of `Bit1`.

    Parameters
    ----------
    low, high : the values, by their bits as a signed integer; an element that is neither comes back as `low`

    Notes
    -----
    dtypes: float64, float32, float16, bfloat16. 1 bit per element; lossless for what `of` has found it for, with the
    sign of zero and the bits of NaN. Allocates a byte for each element.
    """

    name = "pair"
    lossless = True

    low: int
    high: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Pair | None:
        """Return the codec of a tensor in host memory; None where it has more than two values, or gaps.

        Most tensors with more values show them in their first elements. All elements are read of the rest.
        """
        dense = tensor.dtype in INTEGERS and layout_of(tensor.shape, tensor.stride()).dense
        if not dense or not tensor.numel() or tensor.is_neg():
            return None
        bits = _bits(tensor)
        if len(set(bits[:HEAD_COUNT].tolist())) > 2:
            return None
        low, high = bits.aminmax()
        if not ((bits == low).logical_or_(bits == high)).all():
            return None
        return _pair(int(low), int(high))

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in INTEGERS

    def size(self, spec: Spec) -> Exact:
        check_dtype(self, spec.dtype)
        return Exact(PLANE._nbytes(spec.numel, 1))

    def encode(self, src: torch.Tensor, out: torch.Tensor, key: int = 0) -> int:
        nbytes = self.size(Spec.of(src)).nbytes
        check_buffers(self, src, out, nbytes, "encode", SpecError)
        PLANE.encode(_bits(src) == self.high, out)
        return nbytes

    def decode(self, buf: torch.Tensor, out: torch.Tensor, key: int = 0) -> None:
        check_buffers(self, out, buf, self.size(Spec.of(out)).nbytes, "decode", PayloadError)
        high = torch.empty(out.numel(), dtype=torch.bool, device=out.device)
        PLANE.decode(buf, high)
        _bits(out).fill_(self.low).masked_fill_(high, self.high)


@lru_cache(maxsize=256)  # one object for each pair, by which routes know their codec
def _pair(low: int, high: int) -> Pair:
    return Pair(low, high)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements in storage order as integers, so that NaN and the sign of zero compare by their bits."""
    return storage_slice(tensor, 0, tensor.numel()).view(INTEGERS[tensor.dtype])
