"""Affine groups in a graph: int8(affine), and int6 to int2. The bytes of their sections: csrc/affine.md."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from actstore.codecs import Int8
from actstore.codecs.affine import AffineCodec
from actstore.compiled.formats.base import GraphCodec
from actstore.compiled.formats.groups import Grouping, joined
from actstore.compiled.formats.planes import join_bits, split_bits
from actstore.kernels.affine import widths
from actstore.kernels.torch.affine import quantize
from actstore.policy.options import codec_text

LOST = 128  # the code of NaN and Inf in 8 bits


class AffineGraph(GraphCodec):
    """Codes from the minimum of a group: their planes, uint8, then scales and minima, bfloat16: eager's bytes."""

    def __init__(self, codec: Int8 | AffineCodec, grouping: Grouping, dtype: torch.dtype) -> None:
        self._bits = 8 if isinstance(codec, Int8) else codec.bits
        self._widths = [width for width in widths(self._bits) if width]
        self._keep = codec.signs == "keep"
        self._grouping = grouping
        self._dtype = dtype
        self.text = codec_text(codec)
        self.per_byte = dtype.itemsize * 8 // self._widths[0]
        self.crosses_rows = grouping.crosses_rows

    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        grouping = self._grouping
        encoded = [self._quantize(groups) for groups in grouping.split(grouping.rows(tensor).to(torch.float32))]
        codes = grouping.join([each[0] for each in encoded])
        planes, shift = [], 0
        for width in self._widths:
            planes.append(join_bits(codes >> shift, width))
            shift += width
        return [*planes, *(joined([each[place] for each in encoded]) for place in (1, 2))]

    def _quantize(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes, *numbers = quantize(groups.flatten(0, -2), None, self._bits, self._keep)
        scales, minima = (each.view(torch.bfloat16).view(groups.shape[:-1]) for each in numbers)
        return codes.view(groups.shape), scales, minima

    def decode(self, payload: Sequence[Tensor]) -> Tensor:
        *planes, scales, minima = payload
        codes, shift = None, 0
        for plane, width in zip(planes, self._widths, strict=True):
            part = split_bits(plane, width)[..., : self._grouping.numel] << shift
            codes = part if codes is None else codes | part
            shift += width
        assert codes is not None
        split = self._grouping.split_numbers
        parts = zip(self._grouping.split(codes), split(minima), split(scales), strict=True)
        return self._grouping.restore(self._grouping.join([self._values(*part) for part in parts]))

    def _values(self, groups: Tensor, minima: Tensor, scales: Tensor) -> Tensor:
        codes = groups.to(torch.float32)  # Inductor's loops compare float32 faster than int8
        low, step = minima.to(torch.float32), scales.to(torch.float32)
        lost, steps = ~low.isfinite(), codes
        if self._bits == 8:
            lost, steps = lost | (codes == LOST), torch.where(codes < LOST, codes + 127, codes - 129)
        quarters = low * 0.25 + steps * (step * 0.25)
        largest = torch.finfo(self._dtype).max
        values = (quarters * 4).clamp(-largest, largest).to(self._dtype)
        return torch.where(lost, nan, values)
