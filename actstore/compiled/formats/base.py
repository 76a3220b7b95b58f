"""The interface of a codec inside of a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class GraphCodec(ABC):
    """A codec as two functions of tensors, which are traced into the graphs. Its payload is a list of tensors.

    Attributes
    ----------
    text : the codec as policy text
    per_byte : bytes of the tensor for each byte of the first payload, for sizes that change from run to run
    crosses_rows : whether groups begin and end inside of rows, so that a loop over rows divides to find an element's
    """

    text: str
    per_byte: int
    crosses_rows: bool = False

    @abstractmethod
    def encode(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the payload of a tensor."""

    @abstractmethod
    def decode(self, payload: Sequence[Tensor]) -> Tensor:
        """Return the tensor of a payload: dense, its dimensions in the order of the encoded one's strides."""
