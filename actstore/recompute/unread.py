"""Outputs of excepted parts that the region does not read, such as attention weights that a block drops."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

_NOTHING: AbstractContextManager[Any] = nullcontext()


def compiles() -> bool:
    """Return whether `torch.compile` was called: the compiler leaves functions alone that are called below a mode."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(backend is not None for backend in backends.values())


class OutputReads(TorchFunctionMode):
    """Mode that sees which outputs of excepted parts the first run of a region reads.

    It sees PyTorch's functions and methods, also those that compute no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[int, Tensor] = {}  # by identity, alive until the region ends
        self._read = set[int]()

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """See reads of these tensors from now on."""
        self._watched.update((id(tensor), tensor) for tensor in tensors)

    def note(self, values: Iterable[Any]) -> None:
        """Count watched tensors among values as read."""
        self._read.update(id(value) for value in _leaves(values) if id(value) in self._watched)

    def has_read(self, tensors: Sequence[int]) -> bool:
        """Return whether any of the tensors with these identities was read."""
        return not self._read.isdisjoint(tensors)

    def paused(self) -> AbstractContextManager[Any]:
        """Return a context without the mode, for a part: compilers see modes. One that lies below another stays."""
        count = _len_torch_function_stack()
        return _pop_mode_temporarily() if count and _get_function_stack_at(count - 1) is self else _NOTHING

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._watched:
            self.note((*args, *kwargs.values()) if kwargs else args)
        return func(*args, **(kwargs or {}))


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        elif isinstance(value, dict):
            yield from _leaves(value.values())
        else:
            yield value
