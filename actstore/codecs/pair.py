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
CHUNK_COUNT = 1 << 16  # elements, which a cache holds


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
        """Return the codec of a tensor in host memory; None where it has one value, more than two, or gaps.

        Most tensors show more values in their first elements. All elements are read of the rest.
        """
        dense = tensor.dtype in INTEGERS and layout_of(tensor.shape, tensor.stride()).dense
        if not dense or not tensor.numel() or tensor.is_neg():
            return None
        bits = _bits(tensor)
        values = sorted(set(bits[:HEAD_COUNT].tolist()))
        if len(values) == 1:
            values = [int(value) for value in bits.aminmax()]
        if len(values) > 2 or values[0] == values[1]:
            return None
        found = _pair(*values)
        return found if all(map(found._holds, bits.split(CHUNK_COUNT))) else None

    def _holds(self, bits: torch.Tensor) -> bool:
        """Return whether no element is a third value."""
        if self.high - self.low > torch.iinfo(bits.dtype).max:
            return bool(((bits == self.low) | (bits == self.high)).all())
        return not any(torch.minimum(bits - self.low, self.high - bits).aminmax())  # faster than a comparison

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
        bits = _bits(out).copy_(high)
        span, half = self.high - self.low, torch.iinfo(bits.dtype).max + 1
        bits.mul_((span + half) % (2 * half) - half).add_(self.low)  # modulo the size of an integer, as these are


@lru_cache(maxsize=256)  # one object for each pair, by which routes know their codec
def _pair(low: int, high: int) -> Pair:
    return Pair(low, high)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements in storage order as integers, so that NaN and the sign of zero compare by their bits."""
    return storage_slice(tensor, 0, tensor.numel()).view(INTEGERS[tensor.dtype])
