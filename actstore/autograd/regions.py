"""The region of a storage that one payload holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from actstore.base.layout import Layout, layout_of, storage_view

MAX_STORAGE_RATIO = 4  # a view's payload is its whole storage where that is at most this many times larger


class Region(NamedTuple):
    """The part of a storage that a payload holds, in elements.

    Attributes
    ----------
    start, numel : the elements `start` to `start + numel` of the storage; or, where `compact` is given, only the
        elements of one strided view from `start`
    compact : (shape, stride) of unique elements in storage order
    whole : (shape, stride) of the tensor in which the payload sees all elements of the storage; None: in one row
    """

    start: int
    numel: int
    compact: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    whole: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def covers(self, offset: int, layout: Layout) -> bool:
        """Return whether a view of the same storage can be rebuilt from this region."""
        if self.compact is not None:
            return offset == self.start and layout.compact == self.compact
        return self.start <= offset and offset + layout.span <= self.start + self.numel


def is_whole(tensor: Tensor, total: int) -> bool:
    """Return whether `tensor` is all of a storage of `total` bytes, contiguous and without lazy bits."""
    return tensor.nbytes == total and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def region_of(tensor: Tensor, *, lossless: bool) -> tuple[Tensor, Region]:
    """Return a dense tensor to encode, from which `tensor` can be rebuilt, and the region of the storage that it is.

    * the whole storage, where it is little more than the view: all its views then share one payload, as q, k and v do.
      A lossy codec shares scales between the view and the rest of the storage, so the rest must be meaningful: it is
      where one differentiable operator wrote all of it;
    * else the span of the view, where that is little more than the view;
    * else only the elements of the view, gathered.
    """
    total, nbytes, itemsize = tensor.untyped_storage().nbytes(), tensor.nbytes, tensor.dtype.itemsize
    layout = layout_of(tensor.shape, tensor.stride())
    offset, base = int(tensor.storage_offset()), tensor._base
    whole_is_meant = lossless or (base is not None and _written_at_once(base))
    tensor = _stored_bits(tensor.detach())
    if layout.dense and total == nbytes:
        return tensor, Region(0, layout.span)
    if whole_is_meant and total <= MAX_STORAGE_RATIO * nbytes and total % itemsize == 0:
        count = total // itemsize
        if not lossless and base is not None and base.dtype is tensor.dtype:
            shape, stride = tuple(base.shape), base.stride()
            if layout_of(shape, stride).dense:  # whose rows differ in scale
                return tensor.as_strided(shape, stride, 0), Region(0, count, whole=(shape, stride))
        return storage_view(tensor, 0, count), Region(0, count)
    if layout.dense:
        return tensor, Region(offset, layout.span)
    if layout.compact is None or (lossless and layout.span * itemsize <= MAX_STORAGE_RATIO * nbytes):
        return storage_view(tensor, offset, layout.span), Region(offset, layout.span)
    gathered = tensor.as_strided(*layout.compact).contiguous()
    return gathered, Region(offset, gathered.numel(), layout.compact)


def source_at(tensor: Tensor, region: Region | None, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor | None:
    """Return the source of a payload of `region` as it is now; None where the storage has become too small.

    Parameters
    ----------
    tensor : any view of the storage
    region : None: all of the storage
    shape, stride : of the tensor that the payload was made for
    """
    bits = _stored_bits(tensor.detach())
    start, numel, compact, whole = region or Region(0, layout_of(shape, stride).span)
    layout = layout_of(shape, stride) if compact is None else layout_of(*compact)
    span = numel if compact is None else layout.span
    if (start + span) * tensor.itemsize > tensor.untyped_storage().nbytes():
        return None
    if compact is not None:
        return bits.as_strided(*compact, start).contiguous()
    if whole is not None:
        return bits.as_strided(*whole, start)
    if layout.dense and layout.span == numel:
        return bits.as_strided(shape, stride, start)
    return storage_view(bits, start, numel)


def exact_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same values and strides in memory of its own, at offset 0."""
    bits = _stored_bits(tensor.detach())
    span = layout_of(tensor.shape, tensor.stride()).span
    copy = storage_view(bits, int(tensor.storage_offset()), span).clone().as_strided(tensor.shape, tensor.stride(), 0)
    if tensor.is_conj():
        copy = copy.conj()
    return torch._neg_view(copy) if tensor.is_neg() else copy


def can_be_lossy(layout: Layout) -> bool:
    """Return whether the unique elements of a view are known, so that a lossy codec can encode these alone."""
    return layout.dense or layout.compact is not None


def _written_at_once(base: Tensor) -> bool:
    """Return whether all of `base`'s storage is the output of one differentiable operator, unchanged since."""
    return not base.is_leaf and base._version == 0 and base.nbytes == base.untyped_storage().nbytes()


def _stored_bits(tensor: Tensor) -> Tensor:
    """Return the same memory without lazy conjugation or negation."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor
