"""Which bytes of a storage one payload holds."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from actstore.layout import Layout, layout_of, storage_view

if TYPE_CHECKING:
    from actstore.store import Entry

SPARE = 4  # a view takes its whole storage along when that is at most this many times its own bytes


class Region:
    """The part of a storage that an entry holds.

    Attributes
    ----------
    storage : weak reference; while it is held, no other storage can have the same address
    version : version of the storage when it was encoded
    start, count : the elements `start` to `start + count` of the storage; or, where `compact` is given,
        just the elements of one strided view
    compact : (shape, stride) of unique elements in storage order, relative to `start`
    """

    __slots__ = ("compact", "count", "dtype", "entry", "start", "storage", "version")

    def __init__(
        self,
        storage: StorageWeakRef,
        version: int,
        dtype: torch.dtype,
        start: int,
        count: int,
        compact: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> None:
        self.storage = storage
        self.version = version
        self.dtype = dtype
        self.start = start
        self.count = count
        self.compact = compact
        self.entry: ref[Entry] | None = None

    def covers(self, tensor: Tensor, offset: int, span: int, compact: Any) -> bool:
        """Whether a view of the same storage can be rebuilt from this region."""
        if tensor.dtype != self.dtype or tensor._version != self.version:
            return False
        if self.compact is not None:
            return offset == self.start and compact == self.compact
        return self.start <= offset and offset + span <= self.start + self.count


def region_of(tensor: Tensor, version: int, *, lossless: bool) -> tuple[Tensor, Region]:
    """What to encode so that `tensor` can be rebuilt: a dense source, and the region of the storage that it is.

    * the whole storage, when it is little more than the view: all its views then share one payload, as q, k and v do.
      A lossy codec must know that the rest of the storage means something, since it shares scales with the view: it
      does when one differentiable operator wrote all of it;
    * else the span of the view, where that is little more than the view;
    * else just the elements of the view, gathered.
    """
    storage = tensor.untyped_storage()
    weak, total, itemsize = StorageWeakRef(storage), storage.nbytes(), tensor.dtype.itemsize
    layout = layout_of(tuple(tensor.shape), tensor.stride())
    offset, base = tensor.storage_offset(), tensor._base
    whole_is_meant = lossless or (base is not None and _written_at_once(base))
    tensor = _stored_bits(tensor.detach())
    if layout.dense and total == layout.span * itemsize:
        return tensor, Region(weak, version, tensor.dtype, 0, layout.span)
    nbytes = tensor.nbytes
    if whole_is_meant and total <= SPARE * nbytes and total % itemsize == 0:
        count = total // itemsize
        return storage_view(tensor, 0, count), Region(weak, version, tensor.dtype, 0, count)
    if layout.dense:
        return tensor, Region(weak, version, tensor.dtype, offset, layout.span)
    if layout.compact is None or (lossless and layout.span * itemsize <= SPARE * nbytes):
        return storage_view(tensor, offset, layout.span), Region(weak, version, tensor.dtype, offset, layout.span)
    gathered = tensor.as_strided(*layout.compact).contiguous()
    return gathered, Region(weak, version, tensor.dtype, offset, gathered.numel(), layout.compact)


def can_be_lossy(layout: Layout) -> bool:
    """Whether the unique elements of a view can be told: a lossy codec then encodes them and nothing else."""
    return layout.dense or layout.compact is not None


def _written_at_once(base: Tensor) -> bool:
    """Whether all of `base`'s storage is the output of one differentiable operator, unchanged since."""
    return base.grad_fn is not None and base._version == 0 and base.nbytes == base.untyped_storage().nbytes()


def _stored_bits(tensor: Tensor) -> Tensor:
    """The same memory without lazy conjugation or negation."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor
