"""How large the input of a step is, seen before the model runs: a larger batch saves more than any step before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import pstdev
from typing import Any

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module
from torch.utils._pytree import tree_leaves

NOISE = 0.02  # of what a step saves: decisions make such differences, too


class Inputs:
    """Looks at the first tensor that a model is given in each step. Its elements stand for what the step saves.

    Parameters
    ----------
    larger : called before the model runs on an input that is larger than that of all steps before, with how many times
    """

    def __init__(self, model: Module, larger: Callable[[float], None]) -> None:
        self._model = model
        self._larger = larger
        self._largest = self._size = 0
        self._hook: Any = None
        self._saved: deque[int] = deque(maxlen=64)

    def begin(self) -> None:
        """A step begins."""
        if not isinstance(self._model, ScriptModule) and self._model._compiled_call_impl is None:  # which take no hooks
            self._hook = self._model.register_forward_pre_hook(self._look, with_kwargs=True)

    def end(self) -> None:
        """Its forward is over."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def saved(self, nbytes: int) -> None:
        """What a step has saved."""
        if self._size == self._largest:
            self._saved.append(nbytes)

    @property
    def spread(self) -> float:
        """How much steps with equal inputs differ in what they save, as with routers: the standard deviation."""
        spread = pstdev(self._saved) if self._saved else 0.0
        return spread if spread > NOISE * max(self._saved, default=0) else 0.0

    def forget(self) -> None:
        """Steps save something else from now on."""
        self._saved.clear()

    def shrink(self, share: float) -> None:
        """The largest steps are smaller now."""
        self._largest = int(share * self._largest)

    def _look(self, _model: Module, args: Any, kwargs: Any) -> None:
        self.end()  # of several calls in a step the first one tells
        size = next((leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), 0)
        before, self._size, self._largest = self._largest, size, max(self._largest, size)
        if before < size:
            self._saved.clear()
        if 0 < before < size:
            self._larger(size / before)
