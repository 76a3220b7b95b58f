"""Tensors that an excepted part leaves in attributes. The region must not read them: a later call replaces them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Module

from actstore.errors import StateError


class HiddenAttribute:
    """A stand-in for a tensor that an excepted part has put into an attribute. Whatever uses it raises StateError."""

    def __init__(self, module: Module, name: str) -> None:
        self.__dict__["_text"] = f"{type(module).__name__}.{name}"

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self.__dict__["_text"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> NoReturn:
        found = next((arg for arg in args if isinstance(arg, HiddenAttribute)), None)
        _refuse("an attribute" if found is None else found.__dict__["_text"])


def _refuse(attribute: str) -> NoReturn:
    raise StateError(
        f"attribute={attribute}: a recomputed region must not read what a part excepted from it has put there, because "
        "that part does not run again. Return the tensor from the part, or leave its rule out."
    )


def tensors_of(modules: Iterable[Module]) -> dict[tuple[Module, str], Tensor]:
    """Return the tensors that are plain attributes of modules."""
    return {
        (module, name): value for module in modules for name, value in vars(module).items() if isinstance(value, Tensor)
    }


@contextmanager
def hidden(attributes: Iterable[tuple[Module, str]]) -> Iterator[None]:
    """Hide attributes of modules for a while."""
    before: list[tuple[Module, str, Any]] = []
    try:
        for module, name in set(attributes):
            if name in vars(module):
                before.append((module, name, vars(module)[name]))
                vars(module)[name] = HiddenAttribute(module, name)
        yield
    finally:
        for module, name, value in before:
            vars(module)[name] = value
