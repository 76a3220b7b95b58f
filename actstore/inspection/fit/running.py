"""The operator that runs in a dry step, and the module whose forward or backward it belongs to."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch._C import _current_autograd_node
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import _engine_run_backward
from torch.nn import Module

from actstore.model.names import named_modules

SOFTMAX = "_log_softmax"  # of logits
_ENGINE: Any = _engine_run_backward.__code__
_COPIES_LOCALS = sys.version_info < (3, 13)  # into a dict that a frame keeps


class RunningModules:
    """Names for what runs, by the Python frames and autograd's nodes.

    Attributes
    ----------
    operator : that runs, by its name in ``aten``
    optimizer : that updates weights now; empty outside of updates
    loss : modules that ran the last softmax of logits, the innermost one first
    """

    def __init__(self) -> None:
        self.operator = self.optimizer = ""
        self.loss: tuple[str, ...] = ()
        self._names: dict[Module, str] = {}
        self._made: dict[int, tuple[str, ...]] = {}  # modules that made a node, by its number
        self._last = -1

    def name(self, model: Module) -> None:
        """Set the model whose modules have names."""
        self._names = {module: name for name, module in named_modules(model)}

    def begin(self, operator: str) -> None:
        """Begin an operator, whose node has been made."""
        self.operator = operator
        if operator == SOFTMAX:
            self.loss = self._running()[0]
        number = _get_sequence_nr() - 1
        if torch.is_grad_enabled() and number != self._last:
            self._made[number], self._last = self._running()[0], number

    def now(self) -> str:
        """Return text such as ``gelu in blocks.3.mlp.1, run again``; for backward the node of the graph is named."""
        if self.optimizer:
            return f"{self.optimizer}.step"
        (modules, in_backward), name = self._running(), self.operator or "payload"
        again = ", run again" if in_backward and modules else ""
        if in_backward and not modules:
            node: Any = _current_autograd_node()
            name, modules = node.name(), self._made.get(node._sequence_nr(), ())
        return f"{name} in {modules[0] or 'the model'}{again}" if modules else name

    def _running(self) -> tuple[tuple[str, ...], bool]:
        """Return the modules whose forwards run, up to the innermost backward, and whether there is one."""
        found: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not _ENGINE:
            if frame.f_code.co_name == "forward" and (module := _owner(frame)) in self._names:
                found.append(self._names[module])
            frame = frame.f_back
        return tuple(found), frame is not None


def _owner(frame: FrameType) -> Any:
    names = frame.f_locals
    found = names.get("self")
    if _COPIES_LOCALS:
        names.clear()  # it would hold tensors as long as the function runs
    return found if isinstance(found, Module) else None
