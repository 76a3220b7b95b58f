"""Choices of operators in compact form: bools as bits, indices in the narrowest integers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from actstore.base.layout import layout_of
from actstore.codecs import Bit1

_BITS = Bit1()
PACKED_NUMEL = 512  # smaller masks wait as they are
_NARROW = (torch.uint8, torch.int16, torch.int32)


class Packed(NamedTuple):
    """Bools at one bit an element."""

    bits: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.bits.nbytes

    def read(self) -> Tensor:
        """Return the bools."""
        mask = torch.empty_strided(self.shape, self.stride, dtype=torch.bool, device=self.bits.device)
        _BITS.decode(self.bits, mask)
        return mask


class Copy(NamedTuple):
    """Values in the narrowest dtype that holds them."""

    values: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.values.nbytes

    def read(self) -> Tensor:
        """Return the values, which the caller may change."""
        return self.values.clone() if self.values.dtype is self.dtype else self.values.to(self.dtype)


Choice = Packed | Copy


def choice_of(result: Any, bound: int | None = None) -> Any:
    """Return the compact form of a choice, whose indices are at most `bound`. Python numbers stay as they are."""
    if not isinstance(result, Tensor):
        return result
    if result.dtype is torch.bool and type(result) is Tensor and result.numel() > PACKED_NUMEL and not result.is_meta:
        if not layout_of(tuple(result.shape), result.stride()).dense:
            result = result.contiguous()
        bits = torch.empty((result.numel() + 7) // 8, dtype=torch.uint8, device=result.device)
        _BITS.encode(result.detach(), bits)
        return Packed(bits, tuple(result.shape), result.stride())
    narrow = result.dtype
    if bound is not None and result.dtype in (torch.int32, torch.int64):
        narrow = next((dtype for dtype in _NARROW if bound <= torch.iinfo(dtype).max), narrow)
    return Copy(result.detach().clone() if narrow is result.dtype else result.detach().to(narrow), result.dtype)
