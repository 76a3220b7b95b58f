"""Input sizes of steps, known before the model runs: a larger batch saves more than any earlier step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import pstdev
from typing import Any

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module
from torch.utils._pytree import tree_leaves

SPREAD_NOISE = 0.02  # of a step's saved bytes: decisions alone make differences up to this


class Inputs:
    """Size of the first tensor argument of the model in each step. Its numel stands for the bytes that the step saves.

    Parameters
    ----------
    larger : called with the ratio before the model runs on an input larger than in all earlier steps
    """

    def __init__(self, model: Module, larger: Callable[[float], None]) -> None:
        self._model = model
        self._larger = larger
        self._largest = self._size = 0
        self._hook: Any = None
        self._saved: deque[int] = deque(maxlen=64)

    def state(self) -> list[Any]:
        """Return the sizes as JSON values."""
        return [self._largest, self._size, list(self._saved)]

    def resume(self, state: list[Any]) -> None:
        """Take over the sizes of another process."""
        self._largest, self._size, saved = state
        self.forget()
        self._saved.extend(saved)

    def begin(self) -> None:
        """Register the hook that reads the input size of the step."""
        if not isinstance(self._model, ScriptModule) and self._model._compiled_call_impl is None:  # these take no hooks
            self._hook = self._model.register_forward_pre_hook(self._look, with_kwargs=True)

    def end(self) -> None:
        """Remove the hook."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def saved(self, nbytes: int) -> None:
        """Record the bytes that a step has saved."""
        if self._size == self._largest:
            self._saved.append(nbytes)

    @property
    def spread(self) -> float:
        """Standard deviation of the saved bytes of steps with equal inputs, as routers cause it."""
        spread = pstdev(self._saved) if self._saved else 0.0
        return spread if spread > SPREAD_NOISE * max(self._saved, default=0) else 0.0

    def forget(self) -> None:
        """Forget the saved bytes of earlier steps."""
        self._saved.clear()

    def shrink(self, share: float) -> None:
        """Scale the largest input size, as the largest steps are smaller now."""
        self._largest = int(share * self._largest)

    def _look(self, _model: Module, args: Any, kwargs: Any) -> None:
        self.end()  # only the first call of a step counts
        size = next((leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), 0)
        before, self._size, self._largest = self._largest, size, max(self._largest, size)
        if before < size:
            self._saved.clear()
        if 0 < before < size:
            self._larger(size / before)
