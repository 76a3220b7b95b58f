"""Attributes of objects and classes, and variables of closures, as mappings that can be read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from types import CellType, FunctionType
from typing import Any
from weakref import ref


class ReachedEntries(MutableMapping[str, Any]):
    """The attributes of an object, of a class, or one of the dicts of a module.

    An object is known by a weak reference, as what it holds may hold the graph that this belongs to. It has no entries
    when it is gone.

    Parameters
    ----------
    view : returns the entries of the owner, to read
    """

    __slots__ = ("_owner", "_view")

    def __init__(self, owner: Any, view: Callable[[Any], Any] = vars) -> None:
        self._view = view
        try:
            self._owner: Callable[[], Any] = ref(owner)
        except TypeError:
            self._owner = lambda: owner

    @property
    def are_gone(self) -> bool:
        """True if the owner is gone."""
        return self._owner() is None

    def view(self) -> Mapping[str, Any]:
        """Return the entries."""
        owner = self._owner()
        return {} if owner is None else self._view(owner)

    def __getitem__(self, name: str) -> Any:
        return self.view()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        view: Any = self.view()
        view[name] = value

    def __delitem__(self, name: str) -> None:
        view: Any = self.view()
        del view[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.view())

    def __len__(self) -> int:
        return len(self.view())


class ClassEntries(ReachedEntries):
    """The attributes of a class."""

    def __setitem__(self, name: str, value: Any) -> None:
        if (kind := self._owner()) is not None:
            setattr(kind, name, value)

    def __delitem__(self, name: str) -> None:
        if name in self.view():
            delattr(self._owner(), name)


class CellEntries(ReachedEntries):
    """The variables of enclosing functions that a function reads."""

    def __init__(self, function: FunctionType) -> None:
        super().__init__(function, _variables)

    def __setitem__(self, name: str, value: Any) -> None:
        if (function := self._owner()) is not None:
            _cells(function)[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        if name in self.view():
            del _cells(self._owner())[name].cell_contents


def _cells(function: FunctionType) -> dict[str, CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _variables(function: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in _cells(function).items():
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found
