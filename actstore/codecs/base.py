"""The interface of a codec: a pure function from a dense tensor to bytes and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch

from actstore.base.spec import Spec
from actstore.errors import ChainError

LOSSY_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})  # those that lossy codecs take


@dataclass(frozen=True)
class Exact:
    """The size of a payload that has exactly this many bytes."""

    nbytes: int


@dataclass(frozen=True)
class AtMost:
    """The size of a payload of at most this many bytes. It begins with its length, a little-endian 64-bit integer.

    On a CPU `encode` returns that length. On another device the device writes it later, and `encode` returns this
    bound, so that the host does not wait. A payload of no bytes has no length in it, and is `Exact`.
    """

    nbytes: int


Size = Exact | AtMost


class Bound(NamedTuple):
    """A codec for one kind of tensor: ``encode(src, out, key) -> used`` and ``decode(buf, out, key)``.

    `used` may be None where the payload is exact: all of `nbytes`.
    """

    nbytes: int  # to reserve for the payload
    exact: bool  # the payload has exactly this many bytes, not at most
    encode: Callable[[torch.Tensor, torch.Tensor, int], int | None]
    decode: Callable[[torch.Tensor, torch.Tensor, int], object]
    as_is: bool = False  # the payload is the elements as they lie in storage
    blank: bool = False  # encode writes nothing: only the sizes of payloads matter


@dataclass(frozen=True)
class Codec(ABC):
    """A pure function that encodes a dense tensor to one buffer of bytes, and its inverse.

    Subclasses are frozen dataclasses, which gives them equality, hash, repr and options. Their fields are the options
    of the policy text: ``int8(group=64)`` is ``Int8(group=64)``.

    Attributes
    ----------
    lossless : every element comes back bit for bit
    keyed : rounds with random bits, drawn from the `key` of `encode`: the same key gives the same bytes everywhere
    shaped : the payload depends on the shape, not only on the elements in storage order
    chained : an inner codec encodes the elements that this codec makes
    reproducible : `encode` writes the same bytes in every version of the libraries that do the work
    """

    name: ClassVar[str]
    reproducible: ClassVar[bool] = True

    @property
    @abstractmethod
    def lossless(self) -> bool: ...

    @property
    def keyed(self) -> bool:
        return False

    @property
    def shaped(self) -> bool:
        return False

    @property
    def decides(self) -> bool:
        """Return whether the payload holds only the decision that backward reads, so that no error is measured."""
        return False

    @property
    def plain(self) -> Codec:
        """The codec that makes the same bytes and has no side effects; an observing codec returns its inner one."""
        return self

    @property
    def keeping_signs(self) -> Codec | None:
        """The variant of this codec that keeps zeros, positive and negative elements apart, unless its options forbid.

        A store takes it where backward decides by the sign of an element, as after ReLU. Where it is None, the store
        keeps such tensors exact.
        """
        return self if self.lossless else None

    def replaced_by(self, side: Codec) -> Codec:
        """Return the codec for a tensor if backward reads only what `side` holds, in place of this one."""
        return side

    @property
    def chained(self) -> bool:
        return any(isinstance(getattr(self, field.name), Codec) for field in fields(self))

    def require(self) -> None:
        """Check that the packages are installed without which the codec, or one inside, never encodes.

        Raises
        ------
        KernelUnavailable : one is missing; the error says how to install it
        """
        for field in fields(self):
            if isinstance(inner := getattr(self, field.name), Codec):
                inner.require()

    @abstractmethod
    def accepts(self, dtype: torch.dtype) -> bool:
        """Return whether the codec can encode tensors of this dtype."""

    @abstractmethod
    def size(self, spec: Spec) -> Size:
        """Return the size of the payload of a tensor with this spec.

        Raises
        ------
        SpecError : the dtype is not accepted
        """

    @abstractmethod
    def encode(self, src: torch.Tensor, out: torch.Tensor, key: int = 0) -> int:
        """Write the payload of `src` into `out` and return the bytes used.

        Parameters
        ----------
        src : Tensor, any shape, non-overlapping and dense strides (elements are read in storage order)
        out : Tensor, 1-d uint8, contiguous, 16-byte aligned, at least ``size(spec).nbytes``, on `src`'s device
        key : the seed of the random bits of a `keyed` codec, 0 to 2**63 - 1; `decode` needs the same

        Raises
        ------
        SpecError : the dtype is not accepted, or `out` is too small

        Notes
        -----
        Runs on the current stream, and never waits for the device.
        """

    def bind(self, src: torch.Tensor) -> Bound:
        """Return `encode` and `decode` without checks, for tensors with `src`'s dtype, device and number of elements.

        For callers that repeat one kind of tensor and keep the rules of `encode` and `decode` themselves. The tensors
        of a `shaped` codec also have `src`'s shape and strides when they are encoded; they decode into any tensor.

        Raises
        ------
        SpecError : the dtype is not accepted
        """
        size, decode = self.size(Spec.of(src)), self.decode
        if self.shaped:
            shape, stride = src.shape, src.stride()

            def decode(buf: torch.Tensor, out: torch.Tensor, key: int = 0) -> None:
                self.decode(buf, out.as_strided(shape, stride), key)

        return Bound(size.nbytes, isinstance(size, Exact) or not size.nbytes, self.encode, decode)

    @abstractmethod
    def decode(self, buf: torch.Tensor, out: torch.Tensor, key: int = 0) -> None:
        """Fill `out`, which has the shape, strides and dtype of the encoded tensor, from the payload in `buf`.

        Raises
        ------
        PayloadError : `buf` is smaller than the payload must be, or on a CPU holds bytes that no `encode` writes, where
            the codec can tell
        """


def require_leaf(outer: str, inner: object) -> None:
    """Check the inner codec of a chain that can hold one codec and no more.

    Raises
    ------
    ChainError : `inner` is not a codec, or has an inner codec of its own
    """
    if not isinstance(inner, Codec):
        call = f". Call it: {inner.__name__}()" if isinstance(inner, type) and issubclass(inner, Codec) else ""
        raise ChainError(f"{outer} takes a codec such as Int8() or Raw() inside, not {inner!r}{call}", inner=inner)
    if inner.chained:
        raise ChainError(
            f"{outer}({inner.name}(...)) is refused: {inner.name} has an inner codec of its own, and {outer} takes one "
            f"that has none. Write {outer}(int8) or {outer}(raw).",
            inner=inner,
        )
