"""The states of optimizers, and the parameters that only an optimizer refers to."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakMethod, WeakSet, finalize

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from actstore.rerun.values import Value


def live_optimizers() -> list[Optimizer]:
    """Return all optimizers of the process, but for those that `gc.freeze` has hidden: no list of Python's has them.

    An object refers to its class: a list of all objects would take megabytes, where memory may have run out.
    """
    found = gc.get_referrers(*_with_subclasses(Optimizer))
    return [thing for thing in found if issubclass(type(thing), Optimizer)]  # isinstance asks proxies


def leaves_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def serving(model: Module, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that have a parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    return [optimizer for optimizer in optimizers if any(id(leaf) in own for leaf in leaves_of(optimizer))]


# Hooks of objects that were collected, which may be in the midst of an optimizer's loop over all hooks: the next object
# removes them.
_left: deque[RemovableHandle] = deque()


class OptimizerHook:
    """A hook on each step of all optimizers, until `close`.

    Parameters
    ----------
    method : called with the optimizer. The hook does not keep its object alive
    register : PyTorch's function that registers the hook, to run before or after a step
    """

    def __init__(self, method: Callable[[Optimizer], None], register: Callable[[Any], RemovableHandle]) -> None:
        with suppress(IndexError):  # of no further one
            while True:
                _left.popleft().remove()
        self._hook = register(_telling(WeakMethod(method)))
        self._left_behind = finalize(self, _left.append, self._hook)

    def close(self) -> None:
        """Remove the hook."""
        if self._left_behind.detach():
            self._hook.remove()


class SteppedOptimizers:
    """Optimizers of a model, each found by a hook when it steps, until `close`.

    Parameters
    ----------
    found : those that are known; new ones join them
    """

    def __init__(self, model: Module, found: WeakSet[Optimizer]) -> None:
        self.found = found
        self._model = model
        self._hook = OptimizerHook(self.meet, register_optimizer_step_post_hook)

    def close(self) -> None:
        """Remove the hook."""
        self._hook.close()

    def meet(self, optimizer: Optimizer) -> None:
        """Note an optimizer that has stepped, if it has parameters of the model."""
        if optimizer not in self.found:
            self.found.update(serving(self._model, [optimizer]))


def _telling(weak: WeakMethod[Callable[[Optimizer], None]]) -> Callable[..., None]:
    """Return a hook for all optimizers."""

    def tell(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        method = weak()
        if method is not None:
            method(optimizer)

    return tell


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


class OptimizerState:
    """The state and the groups of an optimizer. `load_state_dict` would replace tensors, and change some dtypes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state = {leaf: tree_map(_itself, kept) for leaf, kept in optimizer.state.items()}
        options = [value for group in self._groups for name, value in group.items() if name != "params"]
        found = [x for x in tree_leaves([options, list(self._state.values())]) if isinstance(x, Tensor)]
        self._values = [Value(tensor) for tensor in found]

    def restore(self) -> None:
        self.optimizer.state.clear()
        self.optimizer.state.update({leaf: tree_map(_itself, kept) for leaf, kept in self._state.items()})
        for group, found in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(found)
        for value in self._values:
            value.restore()


def _itself(leaf: Any) -> Any:
    return leaf
