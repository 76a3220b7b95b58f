"""Checkpoints of other packages that run on this thread."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._C import _current_autograd_node, _current_graph_task_id
from torch._C._autograd import _top_saved_tensors_default_hooks

CHECKPOINTS = ("torch.utils.checkpoint", "deepspeed.runtime.activation_checkpointing.checkpointing")


def innermost_pack() -> Any:
    """Return the pack hook that this thread entered last; None without saved-tensor hooks."""
    hooks: Any = _top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def in_checkpoint() -> bool:
    """Return whether a checkpoint will recompute the code that runs now.

    A checkpoint packs the tensors saved inside of it with hooks of its own. A reentrant checkpoint runs without
    gradients instead, in the forward of an autograd function.
    """
    if getattr(innermost_pack(), "__module__", "") in CHECKPOINTS:
        return True
    frame: Any = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_globals.get("__name__") in CHECKPOINTS:
            return True
        frame = frame.f_back
    return False


def in_reentrant() -> bool:
    """Return whether a reentrant checkpoint recomputes its forward, in a backward of this thread."""
    node: Any = None if _current_graph_task_id() == -1 else _current_autograd_node()
    return node is not None and node.name() == "CheckpointFunctionBackward"
