"""Codecs that run as kernels: checks in Python, then the kernels for the device and dtype."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from dataclasses import fields, replace
from functools import cache, cached_property
from importlib import import_module
from typing import Any, Literal

import torch

from actstore.base.spec import Spec
from actstore.codecs.base import LOSSY_DTYPES, AtMost, Bound, Codec, Exact, Size
from actstore.codecs.checks import check_buffers, check_dtype, require_choice
from actstore.errors import KernelUnavailable, PayloadError, SpecError
from actstore.kernels.base import LENGTH_NBYTES, Kernels


class KernelCodec(Codec):
    """A codec that runs as kernels, and whose payload has a size, or a bound, by element count.

    The kernels live in ``actstore.kernels``: modules ``cpu.<kernel_name>`` and ``torch.<kernel_name>``, each with a
    function ``kernels``, and functions ``<kernel_name>`` of ``cuda.codecs``.
    """

    @property
    def exact(self) -> bool:
        """Return whether `_nbytes` is the size of the payload, not a bound. Subclasses set it as a class attribute."""
        return True

    @property
    def kernel_name(self) -> str:
        return self.name

    def _options(self) -> dict[str, Any]:
        """Return the options of ``kernels(dtype, device, **options)``: the fields of the codec."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def kernels(self, back_end: str, dtype: torch.dtype, device: torch.device) -> Kernels:
        """Return the kernels of one back end, ``cpu``, ``cuda`` or ``torch``.

        Raises
        ------
        KernelUnavailable : a package that they need is not installed
        """
        if back_end == "cuda":
            find = getattr(import_module("actstore.kernels.cuda.codecs"), self.kernel_name)
        else:
            find = import_module(f"actstore.kernels.{back_end}.{self.kernel_name}").kernels
        kernels: Kernels = find(dtype, device, **self._options())
        return kernels

    @abstractmethod
    def _nbytes(self, numel: int, itemsize: int) -> int:
        """Return the bytes of the payload of `numel` elements; an upper bound where the codec is not `exact`."""

    def _rows_nbytes(self, numel: int, width: int) -> int:
        """Return the same for a tensor whose rows of `width` elements the payload depends on."""
        raise NotImplementedError(f"{self.name} does not depend on rows.")

    @property
    def _flat(self) -> bool:
        """Return whether the codec can encode elements without a shape, as inside of another codec."""
        return True

    def _fitted(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[KernelCodec, int]:
        """Fit the codec to a shape with its strides.

        Returns
        -------
        codec : of the same format, whose kernels the tensor takes
        width : the length of the rows that the payload depends on; 0 where it depends on the number of elements only
        """
        return self, 0

    def size(self, spec: Spec) -> Size:
        check_dtype(self, spec.dtype)
        codec, width = self._fitted(spec.shape, spec.stride)
        numel = spec.numel
        nbytes = codec._rows_nbytes(numel, width) if width else codec._nbytes(numel, spec.dtype.itemsize)
        return Exact(nbytes) if self.exact or not nbytes else AtMost(nbytes)

    def encode(self, src: torch.Tensor, out: torch.Tensor, key: int = 0) -> int:
        bound = self.bind(src)
        check_buffers(self, src, out, bound.nbytes, "encode", SpecError)
        used = bound.encode(src, out, key)
        return bound.nbytes if used is None else used

    def decode(self, buf: torch.Tensor, out: torch.Tensor, key: int = 0) -> None:
        bound = self.bind(out)
        needed = bound.nbytes if self.exact else min(bound.nbytes, LENGTH_NBYTES)
        check_buffers(self, out, buf, needed, "decode", PayloadError)
        bound.decode(buf, out, key)

    def bind(self, src: torch.Tensor) -> Bound:
        codec, width = self._fitted(src.shape, src.stride())
        kernels = codec._kernels.get(src.dtype if src.is_cpu else (src.dtype, src.device)) or codec._prepare(src)
        numel = src.numel()
        nbytes = codec._rows_nbytes(numel, width) if width else codec._nbytes(numel, src.dtype.itemsize)
        if not numel:
            return Bound(nbytes, self.exact or not nbytes, _nothing, _nothing)
        if width and kernels.rows is not None:
            return Bound(nbytes, self.exact, *kernels.rows(numel, width))
        if kernels.bind is not None:
            return Bound(nbytes, self.exact, *kernels.bind(numel))
        run_encode, run_decode = kernels.encode, kernels.decode

        def encode(src: torch.Tensor, out: torch.Tensor, key: int) -> int | None:
            used: int | None = run_encode(src, out, numel, key)
            return used

        def decode(buf: torch.Tensor, out: torch.Tensor, key: int) -> None:
            run_decode(buf, out, numel, key)

        return Bound(nbytes, self.exact, encode, decode)

    @cached_property
    def _kernels(self) -> dict[Any, Kernels]:
        """By dtype on the CPU, by (dtype, device) elsewhere."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # compiled kernels are not pickled

    def _prepare(self, tensor: torch.Tensor) -> Kernels:
        check_dtype(self, tensor.dtype)
        kernels = find_kernels(self, tensor.dtype, tensor.device)
        self._kernels[tensor.dtype if tensor.is_cpu else (tensor.dtype, tensor.device)] = kernels
        return kernels


def find_kernels(codec: KernelCodec, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Find the kernels of the best back end that this machine has, with one warning where it lacks a better one."""
    back_ends = ["torch"]
    if device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None):
        back_ends.insert(0, device.type)
    for back_end in back_ends:
        try:
            return codec.kernels(back_end, dtype, device)
        except KernelUnavailable as error:
            _warn_once(f"{codec.name} runs on {device.type} as PyTorch operations: {error}")
    raise AssertionError("the torch back end is always available.")


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)


def _nothing(source: torch.Tensor, target: torch.Tensor, key: int) -> int:
    """Encode or decode no elements: no bytes."""
    return 0


Signs = Literal["auto", "keep", "round"]
SIGNS: tuple[Signs, ...] = ("auto", "keep", "round")


class SignedCodec(KernelCodec):
    """A lossy codec of floats that can keep zeros, positive and negative elements apart, by its field `signs`."""

    lossless = False

    signs: Signs

    def __post_init__(self) -> None:
        require_choice(self, "signs", SIGNS)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in LOSSY_DTYPES

    def _options(self) -> dict[str, Any]:
        return {"keep": self.signs == "keep"}

    @cached_property
    def keeping_signs(self) -> SignedCodec:  # computed once
        options: dict[str, Any] = {"signs": "keep"}
        return replace(self, **options) if self.signs == "auto" else self
