"""bf16: float32 in half of its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from actstore.codecs import Codec, Exact, Spec, check_buffers, check_dtype, storage_slice
from actstore.errors import PayloadError, SpecError


@dataclass(frozen=True)
class Bf16(Codec):
    """The nearest bfloat16 (``bf16``), or the next one toward zero (``bf16(round=zero)``).

    Notes
    -----
    dtypes: float32. 16 bits per element. ``|x - decode(encode(x))| <= 2**-7 |x| + 2**-133``, half of that to nearest;
    NaN and Inf stay what they are.
    """

    name: ClassVar[str] = "bf16"
    lossless = False

    round: Literal["nearest", "zero"] = "nearest"

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float32

    def size(self, spec: Spec) -> Exact:
        check_dtype(self, spec.dtype)
        return Exact(2 * spec.numel)

    def encode(self, src: Tensor, out: Tensor, key: int = 0) -> int:
        nbytes = self.size(Spec.of(src)).nbytes
        check_buffers(self, src, out, nbytes, "encode", SpecError)
        values, payload = storage_slice(src, 0, src.numel()), out[:nbytes].view(torch.bfloat16)
        if self.round == "zero":
            cut = values.view(torch.int32) & ~0xFFFF
            values = torch.where(values.isnan(), values, cut.view(torch.float32))
        payload.copy_(values)
        return nbytes

    def decode(self, buf: Tensor, out: Tensor, key: int = 0) -> None:
        nbytes = self.size(Spec.of(out)).nbytes
        check_buffers(self, out, buf, nbytes, "decode", PayloadError)
        storage_slice(out, 0, out.numel()).copy_(buf[:nbytes].view(torch.bfloat16))


def error(tensor: Tensor) -> Tensor:
    """The most that an element can be off."""
    return tensor.abs() * 2.0**-7 + 2.0**-133
