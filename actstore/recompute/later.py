"""Attributes that other code changes between a forward and its second run in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from operator import attrgetter, eq, ge, is_
from typing import Any
from weakref import ref

from torch.nn import Module

from actstore.errors import StateError
from actstore.recompute.attribute_values import (
    ABSENT,
    OF_MODULES,
    has_same_content,
    hidden_by_code,
    is_sharded,
    waiting_value,
)  # fmt: skip

MAX_WAITING_LENGTH = 64  # of a container
_training = attrgetter("training")
_Entry = tuple[dict[str, Any], str, Any]  # attributes of a module, a name, and the value


class LaterChanges:
    """Attributes as a forward found them and did not change them, for a second run after other code has.

    Parameters
    ----------
    modules : in the region
    """

    __slots__ = ("_children", "_contents", "_modules", "_names", "_training", "_values")

    def __init__(self, modules: Sequence[Module]) -> None:
        self._modules = modules
        self._training = [*map(_training, modules)]
        self._children: list[tuple[Module | None, ...]] = []
        self._values: list[tuple[dict[str, Any], str, Callable[[Any], bool], Any]] = []  # with a value or its stand-in
        self._contents: list[tuple[dict[str, Any], str, Any, Any]] = []  # a container, and a copy
        self._names: list[tuple[dict[str, Any], frozenset[str]]] = []  # of all attributes of a module

    def keep(self, module: Module, before: dict[str, Any], containers: Iterable[tuple[str, Any, Any]]) -> None:
        """Keep what the forward has found in a module, and not changed."""
        entries, kind = vars(module), type(module).__name__
        self._names.append((entries, _shared(frozenset(entries))))
        if before.keys() <= OF_MODULES:
            return
        of_forward = set()  # their earlier content waits
        for name, value, was in containers:
            if not has_same_content(value, was):
                of_forward.add(name)
            elif waiting_value(name, was) is was:
                if len(was) <= MAX_WAITING_LENGTH:
                    self._contents.append((entries, name, value, was))
                else:
                    self._values.append((entries, name, _long(value), hidden_by_code(f"{kind}.{name}")))
        for name, value in before.items():
            if name not in OF_MODULES and entries.get(name, ABSENT) is value and not is_sharded(value):
                if waiting_value(f"{kind}.{name}", value) is value:
                    self._values.append((entries, name, partial(is_, value), value))
                elif name not in of_forward:
                    self._values.append((entries, name, recognizer(value), hidden_by_code(f"{kind}.{name}")))

    def ended(self) -> None:
        """Mark the end of the forward."""
        self._children = [tuple(module._modules.values()) for module in self._modules]

    def values(self) -> list[_Entry]:
        """Return the attributes that are other objects now, with the value for the second run.

        Raises
        ------
        StateError : a module is another one now
        """
        for module, were in zip(self._modules, self._children, strict=False):
            now = module._modules
            if len(now) < len(were) or not all(map(is_, now.values(), were)):  # more are absent in the second run
                names = [name for name, was in zip(now, were, strict=False) if now[name] is not was]
                raise StateError(
                    f"module={type(module).__name__}.{names[0] if names else ''}: it was replaced between forward and "
                    "backward, and a recomputed module must run as in forward. Replace it behind backward, or write "
                    "keep in place of recompute."
                )
        found: list[_Entry] = []
        for entries, known in self._names:
            new = () if entries.keys() <= known else entries.keys() - known - OF_MODULES
            found += [(entries, name, ABSENT) for name in new if not is_sharded(entries[name])]
        for module, was in zip(self._modules, self._training, strict=True):
            if module.training is not was:
                found.append((vars(module), "training", was))
        for entries, name, is_same, value in self._values:
            now = entries.get(name, ABSENT)
            if not is_same(now) and not is_sharded(now):
                found.append((entries, name, value))
        return found

    def contents(self) -> list[_Entry]:
        """Return the containers that have other content now, with that for the second run."""
        return [
            (entries, name, was)
            for entries, name, value, was in self._contents
            if entries.get(name, ABSENT) is value and not has_same_content(value, was)
        ]


def recognizer(value: Any, *, inside: bool = False) -> Callable[[Any], bool]:
    """Return what tells whether an object is `value`, and keeps no graph alive that a tensor in it may be part of.

    An object that has died is never taken for a later one at its address: it is known by a weak reference. Lists,
    dicts and tuples take none. They are known by their parts, too: other parts, another object. Those inside of
    them may get longer.
    """
    with suppress(TypeError):
        reference = ref(value)
        return lambda now: now is reference()
    if not isinstance(value, list | dict | tuple):
        return partial(is_, value)
    address, fits = id(value), ge if inside else eq
    parts = [recognizer(part, inside=True) for part in _parts(value)]
    return lambda now: (
        id(now) == address
        and isinstance(now, list | dict | tuple)
        and fits(len(found := _parts(now)), len(parts))
        and all(is_same(part) for is_same, part in zip(parts, found, strict=False))
    )


@lru_cache(maxsize=4096)
def _shared(names: frozenset[str]) -> frozenset[str]:
    """Return an equal set, the same one for all calls."""
    return names


def _long(value: Any) -> Callable[[Any], bool]:
    """Return what tells whether an object is a container with the parts that it has now, and keeps no copy of these."""
    known = hash(tuple(map(id, _parts(value))))
    return lambda now: now is value and hash(tuple(map(id, _parts(now)))) == known


def _parts(value: Any) -> list[Any]:
    return [part for item in value.items() for part in item] if isinstance(value, dict) else [*value]
