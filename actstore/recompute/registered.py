"""Parameters, buffers and modules that a forward registers: some modules make their parts in their first call."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

from torch.nn import Module

from actstore.recompute.attribute_values import ABSENT, is_sharded

_Entries = dict[str, Any]  # of one kind, of one module, by name


class Registered:
    """Record of the parameters, buffers and modules in modules before a forward.

    Tensors under the same name are left to `Weights`.

    Parameters
    ----------
    modules : in the region, without those that do not run again with it
    """

    __slots__ = ("_changes", "_entries", "_lengths", "_names", "_values")

    def __init__(self, modules: Iterable[Module]) -> None:
        self._entries: list[_Entries] = [
            each for module in modules for each in (module._parameters, module._buffers, module._modules)
        ]
        self._lengths = [*map(len, self._entries)]
        self._names = [*chain.from_iterable(self._entries)]
        self._values = [*chain.from_iterable(map(dict.values, self._entries))]
        self._changes: list[tuple[_Entries, str, Any]] | None = None

    def ended(self) -> None:
        """Mark the end of the forward, and drop what it has not changed."""
        self._changes = self._changed()
        self._lengths = [*map(len, self._entries)]
        self._names, self._values = [], []

    def values(self) -> list[tuple[_Entries, str, Any]]:
        """Return what the forward has registered or removed, or other code has registered since, with that before."""
        if self._changes is None:
            return self._changed()
        if [*map(len, self._entries)] == self._lengths:
            return self._changes
        pairs = zip(self._entries, self._lengths, strict=True)
        later = [(entries, name) for entries, length in pairs for name in [*entries][length:]]
        return [*self._changes, *((entries, name, ABSENT) for entries, name in later if not is_sharded(entries[name]))]

    def _changed(self) -> list[tuple[_Entries, str, Any]]:
        values = chain.from_iterable(map(dict.values, self._entries))
        if [*map(len, self._entries)] == self._lengths and all(map(is_, values, self._values)):
            return []
        found: list[tuple[_Entries, str, Any]] = []
        items = zip(self._names, self._values, strict=True)
        for entries, length in zip(self._entries, self._lengths, strict=True):
            before = dict(next(items) for _ in range(length))
            for name in {**before, **entries}:
                was, now = before.get(name, ABSENT), entries.get(name, ABSENT)
                is_other = was is not now and (isinstance(was, Module) or was is ABSENT or now is ABSENT)
                if is_other and not (is_sharded(was) or is_sharded(now)):
                    found.append((entries, name, was))
        return found
