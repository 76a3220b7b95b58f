"""Bytes of the tensors of a dry step: how many live at each moment, and what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Literal, get_args
from weakref import ref

import torch
from torch import Tensor, UntypedStorage

from actstore.devices.cpu_memory import NO_RESERVE

Label = Literal["weights", "gradients", "optimizer", "logits", "payloads", "activations", "working"]
# A tensor keeps the label of the highest rank that it had: a weight that autograd saves is a weight.
RANKS: dict[Label, int] = {label: rank for rank, label in enumerate(reversed(get_args(Label)))}


class _UntouchedPages(mmap):
    """Pages that no one has touched: addresses without memory. They die with their storage."""


class LiveMemory:
    """Book of the storages that live, each with a label, and of the moment with most bytes.

    Attributes
    ----------
    nbytes : of all storages that live
    peak_bytes : the most of them since `reset`
    at_peak : bytes by label at that moment; a label that a storage gets later counts, too
    """

    def __init__(self) -> None:
        self.nbytes = self.peak_bytes = 0
        self.at_peak = Counter[Label]()
        self._labels = Counter[Label]()
        self._sizes: dict[int, tuple[int, Label, int]] = {}  # by storage; the int behind counts storages
        self._count = self._count_at_peak = 0
        self._watches: dict[int, ref[object]] = {}

    def reset(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes, self.at_peak = self.nbytes, self._labels.copy()
        self._count_at_peak = self._count

    def empty(self, nbytes: int, label: Label = "working") -> UntypedStorage:
        """Return a storage of `nbytes` > 0 on the CPU that takes no memory until someone writes to it."""
        pages = _UntouchedPages(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS | NO_RESERVE)
        storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
        self._add(storage, label, pages)
        return storage

    def meet(self, tensor: Tensor, label: Label = "working") -> None:
        """Count the storage of a tensor that PyTorch has made, unless it is counted."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes and storage.nbytes():
            self._add(storage, label, storage)

    def label(self, tensor: Tensor, label: Label) -> None:
        """Label a tensor, unless its label has a higher rank."""
        self.meet(tensor, label)
        if tensor.layout is torch.strided:
            self.label_all([tensor.untyped_storage()._cdata], label)

    def label_all(self, keys: Iterable[int], label: Label) -> None:
        """Label storages, by their addresses, unless their labels have a higher rank."""
        for key in keys:
            nbytes, old, number = self._sizes.get(key, (0, label, 0))
            if RANKS[label] > RANKS[old]:
                self._sizes[key] = nbytes, label, number
                for labels in (self._labels, self.at_peak)[: 1 + (number <= self._count_at_peak)]:
                    labels[old] -= nbytes
                    labels[label] += nbytes

    def _add(self, storage: UntypedStorage, label: Label, owner: object) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._count += 1
        self._sizes[key] = nbytes, label, self._count
        self._watches[key] = ref(owner, partial(self._subtract, key))
        self._labels[label] += nbytes
        self.nbytes += nbytes
        if self.nbytes > self.peak_bytes:
            self.reset()

    def _subtract(self, key: int, _: ref[object]) -> None:
        nbytes, label, _number = self._sizes.pop(key)
        del self._watches[key]
        self._labels[label] -= nbytes
        self.nbytes -= nbytes
