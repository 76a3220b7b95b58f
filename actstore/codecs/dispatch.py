"""Codecs of fixed size that run as one kernel: checks in Python, then the kernel for the device and dtype."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from dataclasses import fields
from functools import cache, cached_property
from importlib import import_module
from typing import Any

import torch

from actstore.codecs.base import Bound, Codec, Exact
from actstore.errors import ActstoreError, KernelUnavailable, PayloadError, SpecError
from actstore.kernels.base import Kernels
from actstore.layout import layout_of
from actstore.spec import Spec


class KernelCodec(Codec):
    """A codec whose payload size follows from the element count, and whose fields are the options of its kernels.

    The kernels live in ``actstore.kernels.<name>_cpu``, ``<name>_cuda`` and ``<name>_torch``.
    """

    @abstractmethod
    def _nbytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the payload of `numel` elements."""

    def size(self, spec: Spec) -> Exact:
        self._check_dtype(spec.dtype)
        return Exact(self._nbytes(spec.numel, spec.dtype.itemsize))

    def encode(self, src: torch.Tensor, out: torch.Tensor) -> int:
        kernels = self._kernels.get(src.dtype if src.is_cpu else (src.dtype, src.device)) or self._prepare(src)
        numel = src.numel()
        nbytes = self._nbytes(numel, kernels.itemsize)
        if (
            out.numel() < nbytes
            or out.dtype is not torch.uint8
            or out.device != src.device
            or not out.is_contiguous()
            or not src.is_contiguous()
            or src.is_neg()
            or src.is_conj()
        ):
            self._check(src, out, nbytes, "encode", SpecError)
        if numel:
            kernels.encode(src, out, numel)
        return nbytes

    def decode(self, buf: torch.Tensor, out: torch.Tensor) -> None:
        kernels = self._kernels.get(out.dtype if out.is_cpu else (out.dtype, out.device)) or self._prepare(out)
        numel = out.numel()
        nbytes = self._nbytes(numel, kernels.itemsize)
        if (
            buf.numel() < nbytes
            or buf.dtype is not torch.uint8
            or buf.device != out.device
            or not buf.is_contiguous()
            or not out.is_contiguous()
        ):
            self._check(out, buf, nbytes, "decode", PayloadError)
        if numel:
            kernels.decode(buf, out, numel)

    def bind(self, src: torch.Tensor) -> Bound:
        kernels = self._kernels.get(src.dtype if src.is_cpu else (src.dtype, src.device)) or self._prepare(src)
        numel = src.numel()
        nbytes = self._nbytes(numel, kernels.itemsize)
        if not numel:
            return Bound(nbytes, self.encode, self.decode)
        run_encode, run_decode = kernels.encode, kernels.decode

        def encode(src: torch.Tensor, out: torch.Tensor) -> int:
            run_encode(src, out, numel)
            return nbytes

        def decode(buf: torch.Tensor, out: torch.Tensor) -> None:
            run_decode(buf, out, numel)

        return Bound(nbytes, encode, decode)

    @cached_property
    def _kernels(self) -> dict[Any, Kernels]:
        """By dtype on the CPU, by (dtype, device) elsewhere."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _prepare(self, tensor: torch.Tensor) -> Kernels:
        self._check_dtype(tensor.dtype)
        kernels = find_kernels(self.name, tensor.dtype, tensor.device, self.__getstate__())
        self._kernels[tensor.dtype if tensor.is_cpu else (tensor.dtype, tensor.device)] = kernels
        return kernels

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if not self.accepts(dtype):
            raise SpecError(
                f"{self.name} does not take {str(dtype).removeprefix('torch.')}; "
                "use 'raw', which takes every dtype, or 'keep'",
                codec=self.name,
                dtype=dtype,
            )

    def _check(
        self, tensor: torch.Tensor, payload: torch.Tensor, nbytes: int, verb: str, short: type[ActstoreError]
    ) -> None:
        """Say what is wrong, or return: dense strides may be permuted."""
        spec = Spec.of(tensor)
        where = f"{self.name} {verb} of {spec}"
        if payload.dtype is not torch.uint8 or not payload.is_contiguous():
            raise SpecError(f"{where}: the payload must be contiguous uint8, but is {Spec.of(payload)}", spec=spec)
        if payload.device != tensor.device:
            raise SpecError(f"{where}: the payload is on {payload.device}; give a buffer on {tensor.device}", spec=spec)
        if payload.numel() < nbytes:
            raise short(
                f"{where}: the payload has {payload.numel()} bytes, but {nbytes} are needed",
                spec=spec,
                nbytes=payload.numel(),
                needed=nbytes,
            )
        if not layout_of(spec.shape, spec.stride).dense:
            raise SpecError(f"{where}: the strides leave gaps or overlap; pass tensor.contiguous()", spec=spec)
        if tensor.is_neg() or tensor.is_conj():
            raise SpecError(
                f"{where}: its negation or conjugation is pending; pass tensor.resolve_neg().resolve_conj()", spec=spec
            )


def find_kernels(name: str, dtype: torch.dtype, device: torch.device, options: dict[str, Any]) -> Kernels:
    """Kernels of the best back end that this machine has, with one warning where it is not the best."""
    back_ends = ["torch"]
    if device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None):
        back_ends.insert(0, device.type)
    for back_end in back_ends:
        try:
            kernels: Kernels = import_module(f"actstore.kernels.{name}_{back_end}").kernels(dtype, device, **options)
            return kernels
        except KernelUnavailable as error:
            _warn_once(f"{name} runs on {device.type} as PyTorch operations: {error}")
    raise AssertionError("the torch back end is always available")


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)
