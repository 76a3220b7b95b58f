"""What a codec is: a pure function from a dense tensor to bytes and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from actstore.spec import Spec


@dataclass(frozen=True)
class Exact:
    """The payload has exactly this many bytes."""

    nbytes: int


@dataclass(frozen=True)
class AtMost:
    """The payload has at most this many bytes; `encode` returns how many it used."""

    nbytes: int


Size = Exact | AtMost


class Bound(NamedTuple):
    """A codec for one kind of tensor: the bytes to reserve, ``encode(src, out) -> used``, ``decode(buf, out)``."""

    nbytes: int
    encode: Callable[[torch.Tensor, torch.Tensor], int]
    decode: Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Codec(ABC):
    """Encodes dense tensors to one buffer of bytes and decodes them again.

    Subclasses are frozen dataclasses, so that equality, hash, repr and options come for free. Their fields are the
    options of the policy text: ``int8(group=64)`` is ``Int8(group=64)``.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]

    @abstractmethod
    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this dtype can be encoded."""

    @abstractmethod
    def size(self, spec: Spec) -> Size:
        """Bytes of the payload of a tensor with this spec.

        Raises
        ------
        SpecError : the dtype is not accepted
        """

    @abstractmethod
    def encode(self, src: torch.Tensor, out: torch.Tensor) -> int:
        """Write the payload of `src` into `out` and return the bytes used.

        Parameters
        ----------
        src : Tensor, any shape, non-overlapping and dense strides (elements are read in storage order)
        out : Tensor, 1-d uint8, contiguous, 16-byte aligned, at least ``size(spec).nbytes``, on `src`'s device

        Raises
        ------
        SpecError : the dtype is not accepted, or `out` is too small

        Notes
        -----
        Runs on the current stream, never waits for the device.
        """

    def bind(self, src: torch.Tensor) -> Bound:
        """Encode and decode without checks, for tensors with `src`'s dtype, device and number of elements.

        For callers that repeat one kind of tensor and keep the rules of `encode` and `decode` themselves.

        Raises
        ------
        SpecError : the dtype is not accepted
        """
        return Bound(self.size(Spec.of(src)).nbytes, self.encode, self.decode)

    @abstractmethod
    def decode(self, buf: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out`, which has the shape, strides and dtype of the encoded tensor, from the payload in `buf`.

        Raises
        ------
        PayloadError : `buf` is smaller than the payload must be
        """
