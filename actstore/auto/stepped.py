"""Optimizers of a model that have stepped."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet, ref

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class SteppedOptimizers:
    """Optimizers that have stepped and have parameters of a model, found by a hook until `close`.

    Parameters
    ----------
    before : found earlier for the same model
    """

    def __init__(self, model: Module, before: SteppedOptimizers | None = None) -> None:
        self.found: WeakSet[Optimizer] = WeakSet() if before is None else before.found
        self._model = model
        self._hook = register_optimizer_step_post_hook(_telling(ref(self)))

    def close(self) -> None:
        """Remove the hook on optimizer steps."""
        self._hook.remove()

    def meet(self, optimizer: Optimizer) -> None:
        """Note an optimizer that has stepped, if it has parameters of this model."""
        if optimizer not in self.found:
            mine = {id(parameter) for parameter in self._model.parameters()}
            if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
                self.found.add(optimizer)


def _telling(weak: ref[SteppedOptimizers]) -> Any:
    """Return a hook for all optimizers, with a weak reference: it may outlive a store that is never closed."""

    def met(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        optimizers = weak()
        if optimizers is not None:
            optimizers.meet(optimizer)

    return met
