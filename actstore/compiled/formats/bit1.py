"""bit1 in a graph: bools as bits. The bytes: csrc/bit1.md."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actstore.compiled.formats.base import GraphCodec
from actstore.compiled.formats.groups import Grouping
from actstore.compiled.formats.planes import BYTE, gather_bits, spread_bits


class Bit1Graph(GraphCodec):
    """Bools as bits, eight in a byte: eager's bytes."""

    text = "bit1"
    per_byte = BYTE

    def __init__(self, grouping: Grouping) -> None:
        self._grouping = grouping

    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        return (gather_bits(self._grouping.rows(tensor)),)

    def decode(self, payload: Sequence[Tensor]) -> Tensor:
        return self._grouping.restore(spread_bits(payload[0])[..., : self._grouping.numel])
