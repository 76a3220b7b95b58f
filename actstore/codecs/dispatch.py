"""Codecs that run as kernels: checks in Python, then the kernels for the device and dtype."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from dataclasses import fields
from functools import cache, cached_property
from importlib import import_module
from typing import Any, ClassVar

import torch

from actstore.codecs.base import AtMost, Bound, Codec, Exact, Size
from actstore.errors import ActstoreError, KernelUnavailable, PayloadError, SpecError
from actstore.kernels.base import LENGTH_NBYTES, Kernels
from actstore.layout import layout_of
from actstore.spec import Spec


class KernelCodec(Codec):
    """A codec that runs as kernels, and whose payload has a size, or a bound, by element count.

    The kernels live in ``actstore.kernels.<kernel_name>_cpu``, ``_cuda`` and ``_torch``.
    """

    exact: ClassVar[bool] = True

    @property
    def kernel_name(self) -> str:
        return self.name

    def _options(self) -> dict[str, Any]:
        """What ``kernels(dtype, device, **options)`` gets: the fields of the codec."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @abstractmethod
    def _nbytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the payload of `numel` elements; the most that it can have where the codec is not `exact`."""

    def _shape_args(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """What the kernels of a `shaped` codec get after the key."""
        return ()

    def size(self, spec: Spec) -> Size:
        self._check_dtype(spec.dtype)
        nbytes = self._nbytes(spec.numel, spec.dtype.itemsize)
        return Exact(nbytes) if self.exact else AtMost(nbytes)

    def encode(self, src: torch.Tensor, out: torch.Tensor, key: int = 0) -> int:
        bound = self.bind(src)
        self._check(src, out, bound.nbytes, "encode", SpecError)
        return bound.encode(src, out, key)

    def decode(self, buf: torch.Tensor, out: torch.Tensor, key: int = 0) -> None:
        bound = self.bind(out)
        needed = bound.nbytes if self.exact else min(bound.nbytes, LENGTH_NBYTES)
        self._check(out, buf, needed, "decode", PayloadError)
        bound.decode(buf, out, key)

    def bind(self, src: torch.Tensor) -> Bound:
        kernels = self._kernels.get(src.dtype if src.is_cpu else (src.dtype, src.device)) or self._prepare(src)
        numel = src.numel()
        nbytes = self._nbytes(numel, src.dtype.itemsize)
        if not numel:
            return Bound(nbytes, self.exact, _nothing, _nothing)
        run_encode, run_decode, shape = kernels.encode, kernels.decode, self._shape_args(src)
        exact = self.exact

        def encode(src: torch.Tensor, out: torch.Tensor, key: int) -> int:
            used = run_encode(src, out, numel, key, *shape)
            return nbytes if used is None else used

        def decode(buf: torch.Tensor, out: torch.Tensor, key: int) -> None:
            run_decode(buf, out, numel, key, *shape)

        return Bound(nbytes, exact, encode, decode)

    @cached_property
    def _kernels(self) -> dict[Any, Kernels]:
        """By dtype on the CPU, by (dtype, device) elsewhere."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # compiled kernels are not pickled

    def _prepare(self, tensor: torch.Tensor) -> Kernels:
        self._check_dtype(tensor.dtype)
        kernels = find_kernels(self.kernel_name, tensor.dtype, tensor.device, self._options())
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
        """Say what is wrong with the arguments, if something is."""
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


def _nothing(source: torch.Tensor, target: torch.Tensor, key: int) -> int:
    """Encode or decode of no elements: no bytes."""
    return 0
