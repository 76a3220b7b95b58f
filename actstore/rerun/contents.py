"""What modules hold beside parameters and buffers, and how it is put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module

_CONTAINERS = (dict, list, set, deque)


class Attributes:
    """The attributes of a module: hooks, buffers, flags, whatever it counts."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._found = dict(module.__dict__)

    def restore(self) -> None:
        attributes = self._module.__dict__
        attributes.clear()
        attributes.update(self._found)


class Content:
    """What a container holds. One that holds it still is not written to: its class may not allow that."""

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
    """Of an element, or of a key and its value: their own comparison may not be a truth value."""
    return tuple(map(id, held)) if type(held) is tuple else id(held)


def contents(modules: Iterable[Module]) -> tuple[list[Content], list[Tensor]]:
    """Lists, sets, dicts and deques among the attributes of modules and inside of each other, and plain tensors there.

    Each is given once. Tensors that a graph computed are left out: nobody writes to those.
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
