"""int8 in a graph. The bytes of its two sections: csrc/int8.md."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

import torch
from torch import Tensor

from actstore.codecs import Int8
from actstore.compiled.formats.base import GraphCodec
from actstore.compiled.formats.groups import Grouping, joined
from actstore.policy.options import codec_text

FLUSH = 2.0**-110
LEAST_SCALE = 2.0**-117
TOP_CODE = 127
LOST = -128  # the code of NaN and Inf


class Int8Graph(GraphCodec):
    """Symmetric 8-bit groups: codes, int8, and scales, bfloat16. Both are eager's, byte for byte."""

    def __init__(self, codec: Int8, grouping: Grouping, dtype: torch.dtype) -> None:
        self.text = codec_text(codec)
        self.per_byte = dtype.itemsize
        self.crosses_rows = grouping.crosses_rows
        self._keep = codec.signs == "keep"
        self._grouping = grouping
        self._dtype = dtype

    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        grouping = self._grouping
        encoded = [self._quantize(groups.to(torch.float32)) for groups in grouping.split(grouping.rows(tensor))]
        return grouping.join([codes for codes, _ in encoded]), joined([scales for _, scales in encoded])

    def _quantize(self, values: Tensor) -> tuple[Tensor, Tensor]:
        magnitudes = values.abs()
        finite = magnitudes < inf
        top = torch.where(finite, magnitudes, 0.0).amax(-1, keepdim=True)
        # divides by a tensor: for a number, a GPU would multiply with its reciprocal and lose the last bit
        exact = top / torch.full_like(top, TOP_CODE)
        scale = ((exact.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
        flushed = top < FLUSH
        steps = (values * torch.where(flushed, 0.0, scale.reciprocal())).round()
        stored = torch.where(flushed, 0.0, scale)
        if self._keep:
            steps = torch.where(steps == 0, values.sign(), steps)
            stored = torch.where(flushed & (top != 0), LEAST_SCALE, stored)
        codes = torch.where(finite, steps, float(LOST)).to(torch.int8)
        return codes, stored.squeeze(-1).to(torch.bfloat16)

    def decode(self, payload: Sequence[Tensor]) -> Tensor:
        rows, scales = payload
        parts = zip(self._grouping.split(rows), self._grouping.split_numbers(scales), strict=True)
        return self._grouping.restore(self._grouping.join([self._values(*part) for part in parts]))

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        steps = codes.to(torch.float32)  # Inductor's loops compare float32 faster than int8
        values = steps * scales.to(torch.float32)
        if self._dtype != torch.float32:  # whose payloads never decode beyond its largest number
            largest = torch.finfo(self._dtype).max
            values = values.clamp(-largest, largest).to(self._dtype)
        return torch.where(steps == LOST, nan, values)
