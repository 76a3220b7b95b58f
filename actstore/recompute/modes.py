"""Dispatch modes that see each operator of a region, so that later runs, on inexact inputs, decide as the first run.

In the first run a mode records the choices of each operator that decides: bits, indices, counts. In each later run
another mode returns them in the same order. Values and gradients follow the new inputs; the choices do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from actstore.base.redispatch import OperatorMode
from actstore.recompute.decisions import Decisions
from actstore.recompute.operators import DISCRETE

_NOTHING = nullcontext()


class Mode(OperatorMode):
    """Mode that sees each operator of a run. Under it, compiled parts run uncompiled: kernels would hide operators."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._decisions = decisions
        self._kept = decisions.kept
        self.paused = False  # while a part runs whose decisions are not the region's

    @property
    def count(self) -> int:
        """Number of decisions that have been kept."""
        return len(self._kept)


def modes_paused() -> AbstractContextManager[None]:
    """Return a context to run a region again while regions run: its operators belong to none of these."""
    return _modes_paused() if _len_torch_dispatch_stack() else _NOTHING


@contextmanager
def _modes_paused() -> Iterator[None]:
    paused = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Mode) and not mode.paused]
    for mode in paused:
        mode.paused = True
    try:
        yield
    finally:
        for mode in paused:
            mode.paused = False


def is_choice(result: Any) -> bool:
    """Return whether a result is discrete: a tensor of bools or integers, or a Python number."""
    if isinstance(result, Tensor):
        return result.dtype in DISCRETE
    return isinstance(result, bool | int | float)


def has_floats(args: Sequence[Any]) -> bool:
    """Return whether the first argument is a tensor of real floats."""
    return bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()


def takes_floats(args: Iterable[Any]) -> bool:
    """Return whether an argument, or one in a list, is a tensor of floats."""
    for value in args:
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex():
                return True
        elif isinstance(value, list | tuple) and takes_floats(value):
            return True
    return False


def shape_of(args: Iterable[Any]) -> tuple[int, ...]:
    """Return the shape of the first tensor, and () without a tensor."""
    return next((tuple(value.shape) for value in args if isinstance(value, Tensor)), ())
