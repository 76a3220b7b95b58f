"""Codecs that compress bytes with the library blosc2. The format: csrc/blosc.md."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch

from actstore.base.spec import Spec
from actstore.codecs.base import AtMost, Codec, Exact, Size
from actstore.codecs.checks import check_buffers, check_dtype
from actstore.codecs.raw import Raw
from actstore.errors import ChainError, ConfigError, PayloadError, SpecError
from actstore.kernels import blosc
from actstore.kernels.base import LENGTH_NBYTES, payload_pointer, storage_slice
from actstore.kernels.scratch import scratch

LEVELS = (1, 9)


@dataclass(frozen=True)
class BloscCodec(Codec):
    """The base of `zstd` and `lz4`: the payload of an inner codec, losslessly compressed on the CPU.

    Parameters
    ----------
    inner : any codec but `zstd` and `lz4`
    level : 1, the fastest, to 9
    shuffle : before compression, bring together the first bytes of all elements, then the second ones, and so on
        (``byte``), or the same with bits (``bit``); elements are those of the tensor where `inner` is ``raw``, else
        bytes

    Raises
    ------
    ChainError : `inner` is `zstd` or `lz4`
    ConfigError : another level

    Notes
    -----
    dtypes, error and special values are those of `inner`; lossless where that is. CPU tensors only, on one thread.
    Bytes that do not get smaller are stored as they are: at most 32 bytes and 8 for each 64 MiB more than `inner` has.
    Payloads decode for ever; the bytes of `encode` may change with the version of blosc2. Altered payloads raise
    PayloadError or decode to other values. Allocates the inner payload (not for ``raw``) and a frame of 64 MiB.
    """

    reproducible: ClassVar[bool] = False

    inner: Codec = field(default_factory=Raw)
    level: int = 1
    shuffle: Literal["byte", "bit", "none"] = "byte"

    def __post_init__(self) -> None:
        inner: object = self.inner
        if not isinstance(inner, Codec) or isinstance(inner, BloscCodec):
            raise ChainError(
                f"{self.name} takes a codec of tensors inside, not {self.inner!r}. "
                f"Write {self.name} or {self.name}(int8).",
                inner=self.inner,
            )
        if type(self.level) is not int or not LEVELS[0] <= self.level <= LEVELS[1]:
            raise ConfigError(
                f"{self.name}(level={self.level!r}): must be from {LEVELS[0]} to {LEVELS[1]}.",
                level=self.level,
            )

    @property
    def lossless(self) -> bool:
        return self.inner.lossless

    @cached_property
    def keeping_signs(self) -> BloscCodec | None:  # computed once
        inner = self.inner.keeping_signs
        return self if inner is self.inner else None if inner is None else replace(self, inner=inner)

    @property
    def keyed(self) -> bool:
        return self.inner.keyed

    @property
    def shaped(self) -> bool:
        return self.inner.shaped

    def require(self) -> None:
        blosc.library()
        self.inner.require()

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.inner.accepts(dtype)

    def size(self, spec: Spec) -> Size:
        check_dtype(self, spec.dtype)
        if spec.device.type != "cpu":
            raise SpecError(
                f"{self.name} runs on the CPU, but the tensor is on {spec.device}. Use {self.inner.name!r} there, or "
                "'expack', which is lossless on every device.",
                codec=self.name,
                device=spec.device,
            )
        return AtMost(blosc.bound(self.inner.size(spec).nbytes)) if spec.numel else Exact(0)

    def encode(self, src: torch.Tensor, out: torch.Tensor, key: int = 0) -> int:
        size = self.size(Spec.of(src))
        check_buffers(self, src, out, size.nbytes, "encode", SpecError)
        if not src.numel():
            return 0
        payload_pointer(out)
        if self._plain:
            content = storage_slice(src, 0, src.numel()).view(torch.uint8)
        else:
            content = self._scratch(src)
            content = content[: self.inner.encode(src, content, key)]
        return blosc.compress(content.numpy(), out.numpy(), self._compressor(src.dtype))

    def decode(self, buf: torch.Tensor, out: torch.Tensor, key: int = 0) -> None:
        spec = Spec.of(out)
        size = self.size(spec)
        check_buffers(self, out, buf, min(size.nbytes, LENGTH_NBYTES), "decode", PayloadError)
        if not spec.numel:
            return
        payload_pointer(buf)
        payload = buf.numpy()
        payload = payload[: blosc.length(payload)]
        inner, held = self.inner.size(spec), blosc.content_nbytes(payload)
        if held > inner.nbytes or (isinstance(inner, Exact) and held != inner.nbytes):
            raise PayloadError(
                f"{self.name} decode of {spec}: the payload holds {held} bytes, but {self.inner.name} has {inner}.",
                spec=spec,
            )
        content = storage_slice(out, 0, spec.numel).view(torch.uint8) if self._plain else self._scratch(out)[:held]
        blosc.decompress(payload, content.numpy(), self._compressor(spec.dtype))
        if not self._plain:
            self.inner.decode(content, out, key)

    @property
    def _plain(self) -> bool:
        """Return whether blosc2 compresses the bytes of the tensor itself: the inner codec is ``raw``."""
        return isinstance(self.inner, Raw)

    def _scratch(self, tensor: torch.Tensor) -> torch.Tensor:
        return scratch(self.inner.size(Spec.of(tensor)).nbytes, torch.uint8, tensor.device)

    def _compressor(self, dtype: torch.dtype) -> blosc.Compressor:
        return blosc.Compressor(self.name, self.level, self.shuffle, dtype.itemsize if self._plain else 1)


@dataclass(frozen=True)
class Lz4(BloscCodec):
    """LZ4: faster than `zstd`; it finds repeated bytes only, so that `shuffle` is by bits. See `BloscCodec`."""

    name = "lz4"

    shuffle: Literal["byte", "bit", "none"] = "bit"


@dataclass(frozen=True)
class Zstd(BloscCodec):
    """Zstandard: smaller payloads than `lz4`, for disks and for hosts that are short of memory. See `BloscCodec`."""

    name = "zstd"
