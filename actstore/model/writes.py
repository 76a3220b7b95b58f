"""The tensors of modules that forwards write to in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from actstore.base.storage import storages_of
from actstore.model.tree import Entries


class WatchedTensor(NamedTuple):
    """A tensor that a forward may write to, its version, and a copy of its values before."""

    entries: Entries
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None

    @property
    def key(self) -> tuple[int, str]:
        """Return what a history knows the tensor by."""
        return id(self.entries), self.name

    def before(self) -> WatchedTensor:
        """Return the tensor with its values from before the forward for its copy, where it still has them."""
        return self._replace(copy=self.tensor.detach()) if self.copy is None and not self.is_newer() else self

    def is_newer(self) -> bool:
        """Return whether the version tells a write."""
        return self.tensor._version != self.version

    def is_changed_silently(self) -> bool:
        """Return whether the values differ from the copy's, and the version is the same."""
        tensor = self.tensor
        if self.copy is None or self.is_newer() or tensor.layout is not torch.strided:
            return False
        return not (tensor.is_meta or tensor.is_nested or torch.equal(tensor, self.copy))


class WriteHistory:
    """Record of what the forwards of one module have written to in place, in all calls so far.

    Attributes
    ----------
    known : the tensors: the dict that has each, by identity, and its name
    silent : those among them whose versions do not tell: collectives write so, and what writes to `Tensor.data`
    ended : the modes, training or not, in which a forward has ended
    """

    def __init__(self) -> None:
        self.known = set[tuple[int, str]]()
        self.silent = set[tuple[int, str]]()
        self.ended = set[bool]()

    def end(self, watched: Iterable[WatchedTensor], *, training: bool) -> list[WatchedTensor]:
        """Note the end of a forward, and return the tensors that it has written to.

        What versions do not tell is found in the first forward of each mode, if it changes a value there.
        """
        first = training not in self.ended
        self.ended.add(training)
        written = []
        for each in watched:
            if first and each.is_changed_silently():
                self.silent.add(each.key)
            if each.is_newer() or each.key in self.silent:
                self.known.add(each.key)
                written.append(each)
        return written


def by_copy(watched: Iterable[WatchedTensor]) -> tuple[list[WatchedTensor], list[tuple[str, Tensor]]]:
    """Return the tensors whose copies can stand in for them, and the names of the rest."""
    copied: list[WatchedTensor] = []
    repeated: list[tuple[str, Tensor]] = []
    owners: dict[int, set[int]] = {}  # tensors over one storage must stay so, which copies would not
    for each in (watched := list(watched)):
        for storage in storages_of(each.tensor):
            owners.setdefault(storage._cdata, set()).add(id(each.tensor))
    for each in watched:
        if each.copy is None or any(len(owners[s._cdata]) > 1 for s in storages_of(each.tensor)):
            repeated.append((each.name, each.tensor))
        else:
            copied.append(each)
    return copied, repeated
