"""raw in a graph: the elements as they lie in storage. The bytes: csrc/raw.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actstore.compiled.formats.base import GraphCodec


class RawGraph(GraphCodec):
    """The elements of a tensor in storage order, without gaps: eager's bytes.

    Parameters
    ----------
    dims : the dimensions in storage order, the one with the largest stride first
    """

    text = "raw"
    per_byte = 1

    def __init__(self, dims: tuple[int, ...]) -> None:
        self._dims = dims

    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        return (tensor.permute(self._dims),)

    def decode(self, payload: Sequence[Tensor]) -> Tensor:
        return torch.permute(payload[0], [self._dims.index(dim) for dim in range(len(self._dims))])
