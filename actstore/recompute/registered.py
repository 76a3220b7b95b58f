"""Parameters, buffers and submodules that a forward registers: some modules make their parts in their first call."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

from torch.nn import Module

from actstore.recompute.attribute_values import ABSENT, is_sharded

_Entries = dict[str, Any]  # of one kind, of one module, by name


class Registered:
    """What modules have registered before a forward. Tensors under the same name are left to `Weights`.

    Parameters
    ----------
    modules : in the region, without those that do not run again with it
    """

    __slots__ = ("_before", "_changes", "_lengths")

    def __init__(self, modules: Iterable[Module]) -> None:
        found = [each for module in modules for each in (module._parameters, module._buffers, module._modules)]
        self._before: list[tuple[_Entries, _Entries]] = [(entries, entries.copy()) for entries in found]
        self._changes: list[tuple[_Entries, str, Any]] = []
        self._lengths: list[tuple[_Entries, int]] = []

    def ended(self) -> None:
        """Mark the end of the forward, and drop what it has not changed."""
        self._changes = self._changed()
        self._lengths = [(entries, len(entries)) for entries, _ in self._before]
        self._before = []

    def values(self) -> list[tuple[_Entries, str, Any]]:
        """Return what the forward has registered or removed, or other code has registered since, with that before."""
        later = [(entries, name) for entries, length in self._lengths for name in [*entries][length:]]
        found = [(entries, name, ABSENT) for entries, name in later if not is_sharded(entries[name])]
        return found + (self._changes or self._changed())

    def _changed(self) -> list[tuple[_Entries, str, Any]]:
        found: list[tuple[_Entries, str, Any]] = []
        for entries, before in self._before:
            if len(before) == len(entries) and all(map(is_, before.values(), entries.values())):
                continue
            for name in {**before, **entries}:
                was, now = before.get(name, ABSENT), entries.get(name, ABSENT)
                is_other = was is not now and (isinstance(was, Module) or was is ABSENT or now is ABSENT)
                if is_other and not (is_sharded(was) or is_sharded(now)):
                    found.append((entries, name, was))
        return found
