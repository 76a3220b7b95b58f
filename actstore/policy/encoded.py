"""Codecs on one tensor, for use and study without a store."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actstore.base.layout import layout_of
from actstore.base.spec import Spec
from actstore.codecs import Codec, Exact
from actstore.devices import cpu_memory
from actstore.errors import SpecError
from actstore.kernels.base import LENGTH_NBYTES
from actstore.policy import Encode, parse_decision


@dataclass(frozen=True, eq=False)
class Encoded:
    """The result of `encode`: one payload, with its codec.

    Attributes
    ----------
    codec : Codec
    spec : Spec of the tensor that `decode` returns
    payload : Tensor, (nbytes,), uint8, on the device of the tensor
    key : seed of the random bits
    """

    codec: Codec
    spec: Spec
    payload: torch.Tensor
    key: int

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        return self.payload.numel()

    @property
    def ratio(self) -> float:
        """Bytes of the tensor per byte of the payload; 1 for a tensor without elements."""
        return self.spec.nbytes / self.nbytes if self.nbytes else 1.0

    def decode(self) -> torch.Tensor:
        """Return a new tensor with the shape, strides, dtype and device of the encoded one.

        Raises
        ------
        PayloadError : the payload has changed, where the codec can detect it
        """
        out = self.spec.empty()
        self.codec.decode(self.payload, out, self.key)
        return out

    def __repr__(self) -> str:
        return f"<{Encode(self.codec)} of {self.spec}: {self.nbytes} bytes, ratio {self.ratio:.2f}>"


def encode(tensor: torch.Tensor, codec: str | Codec, key: int = 0) -> Encoded:
    """Encode one tensor.

    Parameters
    ----------
    tensor : Tensor, any shape and strides; a tensor with gaps or overlaps comes back contiguous
    codec : as the policy text writes it, such as ``"int8(affine)"``, or a Codec
    key : seed of the random bits of `round=stochastic` and `round=dither`, 0 to 2**63 - 1

    Raises
    ------
    SpecError : the codec does not accept the dtype, or the tensor has no bytes (sparse, nested, meta)
    PolicyError, ChainError, UnknownCodecError : the text is not a codec

    Notes
    -----
    The host waits for the device where the size of the payload is variable and the device is not a CPU.

    >>> encoded = actstore.encode(torch.randn(1000, 1000), "int8(affine)")
    >>> encoded.ratio, (encoded.decode() - x).norm() / x.norm()
    """
    codec = _read_codec(codec)
    if not 0 <= key < 1 << 63:
        raise SpecError(f"key={key} is not in 0 to 2**63 - 1.", key=key)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else str(tensor.layout)
        raise SpecError(f"a {kind} tensor has no bytes to encode. Give a dense one with data.")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not layout_of(tuple(tensor.shape), tensor.stride()).dense:
        tensor = tensor.contiguous()
    if tensor.is_cpu:
        cpu_memory.install()
    spec = Spec.of(tensor)
    size = codec.size(spec)
    payload = torch.empty(size.nbytes, dtype=torch.uint8, device=tensor.device)
    used = codec.encode(tensor, payload, key)
    if not isinstance(size, Exact) and used:
        used = int(payload[:LENGTH_NBYTES].view(torch.int64))  # on an accelerator, the host waits
        payload = payload[:used].clone()
    return Encoded(codec, spec, payload, key)


def _read_codec(codec: str | Codec) -> Codec:
    if isinstance(codec, Codec):
        return codec
    decision = parse_decision(codec)
    if not isinstance(decision, Encode):
        raise SpecError(f"{codec!r} is a decision, not a codec alone. Give its codec, such as 'int8' or 'raw'.")
    return decision.codec
