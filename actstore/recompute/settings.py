"""Settings of PyTorch's own modules that a forward reads: the rate of a dropout, the epsilon of a norm."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch.nn import Module

from actstore.model.names import is_of_torch
from actstore.recompute.attribute_values import ABSENT, OF_MODULES, is_constant


class ModuleSettings:
    """Plain attributes of the modules of PyTorch's in a region, before a forward. Calls that are alike share them.

    Parameters
    ----------
    modules : of the region
    """

    __slots__ = ("_modules", "_settings")

    def __init__(self, modules: Sequence[Module]) -> None:
        self._modules = modules
        self._settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in modules:
            kind: Any = type(module)
            if is_of_torch(kind):
                entries = vars(module)
                plain = {name: each for name, each in entries.items() if name not in OF_MODULES and is_constant(each)}
                self._settings += [(entries, plain)] if plain else []

    @classmethod
    def now(cls, modules: Sequence[Module], last: ModuleSettings | None) -> ModuleSettings:
        """Return the settings now: `last`, of an earlier call, where they are the same."""
        if last is None or len(last._modules) != len(modules) or not all(map(is_, last._modules, modules)):
            return cls(modules)
        return cls(modules) if last.changes() else last

    def changes(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return the settings that are other ones now: the attributes of a module, the name, and the value before."""
        return [
            (entries, name, was)
            for entries, plain in self._settings
            for name, was in plain.items()
            if (now := entries.get(name, ABSENT)) is not was and (now is ABSENT or is_constant(now))
        ]
