"""Context variables of Python, as a forward found them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar
from weakref import ref

from torch import Tensor

from actstore.model.tree import ABSENT, CONTAINERS, is_constant
from actstore.recompute.attribute_values import can_wait, copy_of, hidden_by_code, recognizer

_T = TypeVar("_T")


class ContextValues:
    """The values of context variables when this object is made, for a forward that runs again later.

    What may hold a graph is not kept: an object is known by a weak reference, and what takes none must still be the
    value in backward. Otherwise its use is an error.
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = [(variable, _kept(variable, value)) for variable, value in copy_context().items()]

    def run(self, function: Callable[[], _T]) -> _T:
        """Run a function with these values alone. What it sets is gone afterwards."""
        values = [(variable, kept(variable.get(ABSENT))) for variable, kept in self._values]
        context = Context()
        for variable, value in values:
            context.run(variable.set, value)
        return context.run(function)


def _kept(variable: ContextVar[Any], value: Any) -> Callable[[Any], Any]:
    """Return the function from the value now to that of the second run."""
    if is_constant(value):
        return lambda _: value
    name = f"ContextVar {variable.name}"
    if can_wait(value):
        if isinstance(value, Tensor):
            version = value._version
            return lambda _: value if value._version == version else hidden_by_code(name)
        was = copy_of(value) if type(value) in CONTAINERS else value
        return lambda _: copy_of(was) if type(was) in CONTAINERS else was
    with suppress(TypeError):
        weak = ref(value)
        return lambda _: hidden_by_code(name) if (found := weak()) is None else found
    is_same = recognizer(value)
    return lambda now: now if is_same(now) else hidden_by_code(name)
