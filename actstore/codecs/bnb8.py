"""bnb8: the dynamic 8-bit blocks of bitsandbytes. The format: csrc/bnb8.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from actstore.base.spec import Spec
from actstore.codecs.base import LOSSY_DTYPES, Codec, Exact
from actstore.codecs.checks import check_buffers, check_dtype
from actstore.errors import PayloadError, SpecError
from actstore.kernels.base import payload_pointer, round_up, storage_slice
from actstore.kernels.torch import bnb8


@dataclass(frozen=True)
class Bnb8(Codec):
    """A byte per element, the index of one of 256 unevenly spaced values, and a float32 scale per 256 elements.

    bitsandbytes does the work, as it does for 8-bit optimizers. The codec is here for comparison: `int8` is faster.

    Notes
    -----
    dtypes: float32, float16, bfloat16. 8.125 bits per element. With ``m`` the largest magnitude of a block,
    ``|x - decode(encode(x))| <= m / 128`` plus half a unit in the last place of the dtype; zero comes back within
    ``m / 40000`` of zero. A block with NaN or Inf decodes to NaN. The bytes are those of the installed bitsandbytes,
    and of the device: nearest values may differ. Allocates: a byte and an element for each element.
    """

    name = "bnb8"
    lossless = False
    reproducible: ClassVar[bool] = False

    def require(self) -> None:
        bnb8.library()

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in LOSSY_DTYPES

    def size(self, spec: Spec) -> Exact:
        check_dtype(self, spec.dtype)
        return Exact(round_up(spec.numel) + 4 * -(-spec.numel // bnb8.BLOCK_NUMEL))

    def encode(self, src: torch.Tensor, out: torch.Tensor, key: int = 0) -> int:
        """Encode as `Codec.encode` says.

        Notes
        -----
        bitsandbytes quantizes on CUDA's legacy default stream, which waits for the current stream, and the current
        stream then waits for it. Other work on the legacy stream comes in between, and CUDA graphs cannot capture this.
        """
        nbytes = self.size(Spec.of(src)).nbytes
        check_buffers(self, src, out, nbytes, "encode", SpecError)
        numel = src.numel()
        if numel:
            payload_pointer(out)
            out[numel : round_up(numel)].zero_()
            bnb8.quantize(storage_slice(src, 0, numel), *self._sections(out, numel))
        return nbytes

    def decode(self, buf: torch.Tensor, out: torch.Tensor, key: int = 0) -> None:
        check_buffers(self, out, buf, self.size(Spec.of(out)).nbytes, "decode", PayloadError)
        numel = out.numel()
        if numel:
            payload_pointer(buf)
            bnb8.dequantize(*self._sections(buf, numel), storage_slice(out, 0, numel))

    @staticmethod
    def _sections(payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        absmaxes = payload[round_up(numel) :][: 4 * -(-numel // bnb8.BLOCK_NUMEL)]
        return payload[:numel], absmaxes.view(torch.float32)
