"""The contents of modules beside parameters and buffers, and how to restore them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module

_CONTAINERS = (dict, list, set, deque)


class Attributes:
    """The attributes of a module: hooks, buffers, flags, counters."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._found = dict(module.__dict__)

    def restore(self) -> None:
        attributes = self._module.__dict__
        attributes.clear()
        attributes.update(self._found)


class Content:
    """The elements of a container. `restore` writes only where they have changed: a class may refuse writes."""

    def __init__(self, container: Any) -> None:
        self._container = container
        self._found = self._read()

    def _read(self) -> list[Any]:
        return list(self._container.items() if isinstance(self._container, dict) else self._container)

    def restore(self) -> None:
        container, found = self._container, self._found
        if list(map(_identity, self._read())) == list(map(_identity, found)):
            return
        container.clear()
        if isinstance(container, list | deque):
            container.extend(found)
        else:
            container.update(dict(found) if isinstance(container, dict) else found)


def _identity(held: Any) -> Any:
    """Return the ids of an element, or of a key and its value, as their ``==`` may not return a bool."""
    return tuple(map(id, held)) if type(held) is tuple else id(held)


def contents(modules: Iterable[Module]) -> tuple[list[Content], list[Tensor]]:
    """Return the lists, sets, dicts and deques among and inside the attributes of modules, and the plain tensors there.

    Each is returned once. Tensors that a graph computed are left out: a step does not write to them.
    """
    containers: list[Content] = []
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    todo = [value for module in modules for value in vars(module).values()]
    while todo:
        value = todo.pop()
        if isinstance(value, (*_CONTAINERS, tuple)):
            if id(value) not in seen:
                seen.add(id(value))
                if not isinstance(value, tuple):
                    containers.append(Content(value))
                todo.extend(value.values() if isinstance(value, dict) else value)
        elif type(value) is Tensor and value.is_leaf:
            tensors[id(value)] = value
    return containers, list(tensors.values())
