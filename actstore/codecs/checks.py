"""Checks that every codec makes before it reads or writes."""

from __future__ import annotations

import torch

from actstore.base.layout import layout_of
from actstore.base.spec import Spec
from actstore.codecs.base import Codec
from actstore.errors import ActstoreError, ConfigError, SpecError
from actstore.kernels.base import payload_pointer


def require_choice(codec: Codec, option: str, choices: tuple[object, ...]) -> None:
    """Refuse a value of an option that is not one of `choices`.

    Raises
    ------
    ConfigError : with the choices
    """
    value = getattr(codec, option)
    if type(value) is not type(choices[0]) or value not in choices:
        *most, last = map(str, choices)
        raise ConfigError(f"{codec.name}({option}={value!r}): must be {', '.join(most)} or {last}.", **{option: value})


def check_dtype(codec: Codec, dtype: torch.dtype) -> None:
    """Refuse a dtype that the codec does not accept, and name codecs that do.

    Raises
    ------
    SpecError : the codec does not accept the dtype
    """
    if not codec.accepts(dtype):
        raise SpecError(
            f"{codec.name} does not take {str(dtype).removeprefix('torch.')}. "
            "Use 'raw', which takes every dtype, or 'keep'.",
            codec=codec.name,
            dtype=dtype,
        )


def check_buffers(
    codec: Codec, tensor: torch.Tensor, payload: torch.Tensor, nbytes: int, verb: str, short: type[ActstoreError]
) -> None:
    """Check a tensor and its payload of at least `nbytes`.

    Raises
    ------
    SpecError : the dtype, the device, the address or the strides of one of them are wrong
    short : the payload is smaller
    """
    spec = Spec.of(tensor)
    where = f"{codec.name} {verb} of {spec}"
    if payload.dtype is not torch.uint8 or not payload.is_contiguous():
        raise SpecError(f"{where}: the payload must be contiguous uint8, but is {Spec.of(payload)}.", spec=spec)
    if payload.device != tensor.device:
        raise SpecError(f"{where}: the payload is on {payload.device}. Give a buffer on {tensor.device}.", spec=spec)
    if payload.numel() < nbytes:
        raise short(
            f"{where}: the payload has {payload.numel()} bytes, but {nbytes} are needed",
            spec=spec,
            nbytes=payload.numel(),
            needed=nbytes,
        )
    payload_pointer(payload)
    if not layout_of(spec.shape, spec.stride).dense:
        raise SpecError(f"{where}: the strides leave gaps or overlap. Pass tensor.contiguous().", spec=spec)
    if tensor.is_neg() or tensor.is_conj():
        raise SpecError(
            f"{where}: its negation or conjugation is pending. Pass tensor.resolve_neg().resolve_conj().", spec=spec
        )
