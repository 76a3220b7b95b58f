"""Verdict on a saved tensor whose target is a codec: encoded by which codec, or kept for which reason."""

from __future__ import annotations

from collections.abc import Set
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from actstore.autograd.composite import has_values
from actstore.autograd.deciders import keep_decisions
from actstore.autograd.protect import PARAMETER, TRANSPARENT, is_cast_parameter, lossy_reason
from actstore.autograd.regions import MAX_STORAGE_RATIO, can_be_lossy
from actstore.base.layout import layout_of
from actstore.base.note import SMALL, Note
from actstore.codecs import Bit1, Codec, Raw

RAW = Raw()
BITS = Bit1()  # for masks, whatever codec the policy has for floats


class Facts(NamedTuple):
    """Facts about a saved tensor beside those that it tells.

    Attributes
    ----------
    known : the tensor that autograd knows: itself, or the wrapper whose part it is
    producer : name of the autograd node whose output `known` is; empty where it has no node
    whole : whether it is all of its storage
    exact : the reason why all that its module saves must be exact, for a protected policy; empty where it need not be
    excluded : the reason why only another site may be lossy in this step; empty otherwise
    read : whether an operator saves it, whose backward reads it; otherwise a region goes on from it
    before : sequence number, one ahead, of the last node that has saved a tensor before, and the bytes of that tensor
    """

    known: Tensor
    producer: str
    whole: bool
    exact: str = ""
    excluded: str = ""
    read: bool = True
    before: tuple[int, int] = (0, 0)


class Verdict(NamedTuple):
    """Codec of a tensor; None where the tensor is kept.

    Attributes
    ----------
    reason : for the report; empty where the tensor goes through the codec of its policy unchanged
    exact : whether the codec of the policy is lossy and `reason` forbids it
    """

    codec: Codec | None
    reason: str = ""
    exact: bool = False


def why_unstorable(tensor: Tensor, *, in_backward: bool) -> str:
    """Return the reason why no codec takes `tensor`; empty where one may."""
    if tensor.is_meta:
        return "a meta tensor has no bytes to encode"
    if tensor._is_zerotensor():  # forward-mode differentiation makes zeros without memory
        return "a tensor of implicit zeros has no bytes to encode"
    if type(tensor) is not Tensor or tensor.is_nested:
        return f"a nested or {type(tensor).__name__} tensor has no bytes to encode"
    if in_backward:
        return "saved by a backward that is itself differentiated"
    return "a quantized tensor has more than its bytes" if tensor.is_quantized else ""


def why_unfit(tensor: Tensor, nbytes: int, min_nbytes: int) -> str:
    """Return the reason why a tensor that is only a part of its storage of `nbytes` is kept; empty where it is not."""
    if not _fits(tensor, nbytes):
        return "its storage has been resized and holds less"
    return SMALL if tensor.nbytes < min_nbytes and nbytes <= MAX_STORAGE_RATIO * tensor.nbytes else ""


def judge(
    tensor: Tensor, codec: Codec, facts: Facts, parameters: Set[int], *, protected: bool, on_device: bool
) -> Verdict:
    """Choose the codec of `tensor`, so that no value loses what the policy protects and no decision of backward flips.

    Parameters
    ----------
    codec, protected : of the tensor's target
    parameters : storages of parameters
    on_device : whether the payload stays on the compute device, where an exact copy would only add bytes
    """
    if facts.producer in TRANSPARENT and is_cast_parameter(facts.known, parameters):
        return Verdict(None, PARAMETER)
    if codec.lossless and codec.accepts(tensor.dtype):
        return Verdict(codec)
    if not (facts.excluded or codec.accepts(tensor.dtype)):
        return _verdict_on_dtype(codec.name, tensor.dtype, on_device)
    reason = facts.excluded or _exact_reason(tensor, codec, facts, protected=protected)
    if not reason:
        kept, why = keep_decisions(
            codec, facts.known, facts.producer, read=facts.read, protected=protected, before=facts.before
        )
        if kept is not None:
            return Verdict(kept, why if kept.decides else "")
        reason = why
    return _exactly(tensor.dtype, reason, on_device)


@lru_cache(maxsize=1024)
def note_of(codec: str, reason: str, exact: bool) -> Note:
    """Return the note of a tensor that goes through `codec` for `reason`; `exact` as that of a verdict."""
    return Note(f"{codec}: {reason}" if exact else reason)


@lru_cache(maxsize=1024)  # for masks, which a step may save as often as activations
def _verdict_on_dtype(codec: str, dtype: torch.dtype, on_device: bool) -> Verdict:
    return _exactly(dtype, f"{codec} does not take {str(dtype).removeprefix('torch.')}", on_device)


def _exactly(dtype: torch.dtype, reason: str, on_device: bool) -> Verdict:
    """Return the verdict on a tensor that must come back exactly for `reason`."""
    exact = BITS if dtype is torch.bool else RAW
    return Verdict(None if on_device and exact is RAW else exact, reason, exact=True)


def _exact_reason(tensor: Tensor, codec: Codec, facts: Facts, *, protected: bool) -> str:
    """Return the reason why `tensor` cannot go through `codec`; empty when it can."""
    known = facts.known
    if not facts.whole and not can_be_lossy(layout_of(tensor.shape, tensor.stride())):
        return "its elements overlap in memory"
    if known is not tensor and not has_values(known, tensor):
        return f"a part of a {type(known).__name__}"
    return "" if not protected else facts.exact or lossy_reason(known, tensor.dtype, facts.producer)


def _fits(tensor: Tensor, nbytes: int) -> bool:
    """Return whether a storage of `nbytes` holds all elements of `tensor`."""
    span = layout_of(tensor.shape, tensor.stride()).span
    return span == 0 or (int(tensor.storage_offset()) + span) * tensor.itemsize <= nbytes
