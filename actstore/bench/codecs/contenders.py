"""Contenders of the benchmark of codecs: actstore's codecs by policy text, and bitsandbytes called directly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actstore.base.spec import Spec
from actstore.bench import data
from actstore.codecs import Codec, Exact
from actstore.errors import ActstoreError, ConfigError, KernelUnavailable
from actstore.kernels.base import LENGTH_NBYTES
from actstore.policy import Encode, parse_decision
from actstore.policy.encoded import Encoded, encode

KEY = 0x5EED  # of the codecs' random bits
BNB = "bnb8 (bitsandbytes)"
BNB_BLOCK = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

DEFAULT = (
    "raw",
    "expack",
    "intpack",
    "bit1",
    "e5m6",
    "int8",
    "int8(affine)",
    "int8(axis=token)",
    "int8(round=dither)",
    "fp8",
    BNB,
    "hadamard128(int8)",
    "nf4",
    "int6",
    "int5",
    "int4",
    "int4(round=dither)",
    "hadamard128(int4)",
    "int3",
    "int2",
    "zmask",
    "zmask(expack)",
    "zmask(int8)",
    "topk(fraction=0.25, int8)",
    "nm(n=2, m=4, int8)",
    "lz4",
    "zstd",
    "zstd(int8)",
)
_FAMILIES = {
    "blocks": ("int8", "int6", "int5", "int4", "int3", "int2", "nf4", "bnb8"),
    "small floats": ("fp8", "e5m6"),
    "rotated blocks": ("hadamard128",),
    "lossless": ("raw", "expack", "intpack", "bit1"),
    "sparse": ("zmask", "topk", "nm"),
    "byte codecs": ("zstd", "lz4"),
}
PEER = "other libraries"
FAMILIES = (*_FAMILIES, PEER)
_FAMILY_OF = {name: family for family, names in _FAMILIES.items() for name in names}
_SPARSE = ("zmask",)  # measured on data with zeros, for which they are meant


class Trip(ABC):
    """Round trip of one tensor: `encode`, then `decode`.

    Attributes
    ----------
    fixed : whether the size of the payload follows from the tensor's spec
    """

    fixed: bool

    @abstractmethod
    def encode(self) -> None: ...

    @abstractmethod
    def decode(self) -> Tensor: ...

    @abstractmethod
    def payload_nbytes(self) -> int:
        """Return the bytes of the encoded payload; wait for the device where only the device knows the length."""


@dataclass(frozen=True)
class Contender:
    """Contender of the benchmark: a codec with its options.

    Attributes
    ----------
    name : actstore's policy text, or the name of a codec of another library
    codec : actstore's; None for bitsandbytes
    """

    name: str
    codec: Codec | None

    @property
    def family(self) -> str:
        return _FAMILY_OF.get(self.codec.name, "blocks") if self.codec else PEER

    @property
    def lossless(self) -> bool:
        return self.codec is not None and self.codec.lossless

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.codec.accepts(dtype) if self.codec else dtype in DTYPES

    def inputs(self, dtypes: list[torch.dtype]) -> list[tuple[torch.dtype, str]]:
        """Return the dtypes to run with and the data for each. A codec without floats runs on indices or masks."""
        floats = [dtype for dtype in dtypes if self.accepts(dtype)]
        if floats:
            sparse = self.codec is not None and self.codec.name in _SPARSE
            return [(dtype, "relu" if sparse else "gaussian") for dtype in floats]
        others = [(data.make(name, (0,)).dtype, name) for name in ("indices", "mask")]
        return [(dtype, name) for dtype, name in others if self.accepts(dtype)][:1]

    def trip(self, source: Tensor) -> Trip:
        """Return a trip that encodes `source` again and again into its own buffers.

        Raises
        ------
        KernelUnavailable : a package is missing
        """
        return OurTrip(self.codec, source) if self.codec else _BnbTrip(source)

    def public_trip(self, source: Tensor) -> Trip:
        """Return a trip through the public functions, which allocate what they return.

        Raises
        ------
        KernelUnavailable : a package is missing
        """
        return PublicTrip(self.codec, source) if self.codec else _BnbTrip(source)


def select(texts: list[str]) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders of these names, or the default ones; and the reason for each default that is missing.

    Raises
    ------
    ConfigError : a text does not name a codec
    """
    found: list[Contender] = []
    missing: dict[str, str] = {}
    for text in texts or DEFAULT:
        try:
            found.append(_contender(text))
        except ActstoreError as error:
            if texts:
                raise
            missing[text] = str(error).splitlines()[0]
    return found, missing


def _contender(text: str) -> Contender:
    if text == BNB:
        return Contender(BNB, None)
    decision = parse_decision(text)
    if not isinstance(decision, Encode):
        raise ConfigError(f"{text!r} is not a codec alone. Give one such as 'int8(group=64)', or {BNB!r}.")
    return Contender(text, decision.codec)


class OurTrip(Trip):
    """Trip through a codec of actstore, from `payload` to `out`."""

    def __init__(self, codec: Codec, source: Tensor) -> None:
        size = codec.size(Spec.of(source))
        self._codec, self._source, self.out = codec, source, torch.empty_like(source)
        self.payload = torch.empty(size.nbytes, dtype=torch.uint8, device=source.device)
        self.fixed = isinstance(size, Exact)

    def encode(self) -> None:
        self._codec.encode(self._source, self.payload, KEY)

    def decode(self) -> Tensor:
        self._codec.decode(self.payload, self.out, KEY)
        return self.out

    def payload_nbytes(self) -> int:
        if self.fixed or not self.payload.numel():
            return self.payload.numel()
        return int(self.payload[:LENGTH_NBYTES].view(torch.int64))


class PublicTrip(Trip):
    """Trip through a codec of actstore by `actstore.encode` and `Encoded.decode`."""

    def __init__(self, codec: Codec, source: Tensor) -> None:
        self._codec, self._source = codec, source
        self.fixed = isinstance(codec.size(Spec.of(source)), Exact)
        self._encoded: Encoded | None = None

    def encode(self) -> None:
        self._encoded = encode(self._source, self._codec, key=KEY)

    def decode(self) -> Tensor:
        assert self._encoded is not None, "encode comes first"
        return self._encoded.decode()

    def payload_nbytes(self) -> int:
        assert self._encoded is not None, "encode comes first"
        return self._encoded.nbytes


class _BnbTrip(Trip):
    """Trip through bitsandbytes. Its functions allocate: with tensors to fill they would copy once more."""

    fixed = True

    def __init__(self, source: Tensor) -> None:
        try:
            from bitsandbytes import functional
        except ImportError as error:
            raise KernelUnavailable("bitsandbytes is not installed. Run pip install 'actstore[bnb]'.") from error
        self._functional, self._source = functional, source
        self._packed: Any = None

    def encode(self) -> None:
        self._packed = self._functional.quantize_blockwise(self._source, blocksize=BNB_BLOCK)

    def decode(self) -> Tensor:
        back: Tensor = self._functional.dequantize_blockwise(*self._packed)
        return back

    def payload_nbytes(self) -> int:
        codes, state = self._packed
        return int(codes.nbytes + state.absmax.nbytes)
