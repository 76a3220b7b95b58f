"""Parameters that a user's autograd.Function saves, as the objects that they are.

PyTorch makes a new tensor of what an unpack hook returns. That has none of the attributes that code puts on Parameters,
such as the `main_grad` of Megatron-LM. The handle of a Parameter holds the Parameter itself, and so a Function that has
saved one with attributes gets that from `ctx.saved_tensors`, as without a store.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from actstore.autograd.deciders import caller
from actstore.autograd.unpack import is_ours
from actstore.base.operators import APPLY_CODE

_C_FUNCTION: Any = torch._C._FunctionBase


def return_originals() -> None:
    """Let the Function that saves a tensor now, if a Function does, return the Parameters that it saves themselves."""
    frame = caller()
    if frame is not None and frame.f_code is APPLY_CODE:
        node: Any = frame.f_locals["cls"]._backward_cls
        if "saved_tensors" not in vars(node):
            node.saved_tensors = property(_saved_tensors)


def _saved_tensors(ctx: Any) -> tuple[Tensor | None, ...]:
    """Return the saved tensors of a node."""
    tensors: tuple[Tensor | None, ...] = _C_FUNCTION.saved_tensors.__get__(ctx)
    return tuple(map(_original, ctx._raw_saved_tensors, tensors))


def _original(saved: Any, tensor: Tensor | None) -> Tensor | None:
    """Return the Parameter that a store has kept for a saved tensor; for any other saved tensor, `tensor`."""
    handle = saved.data
    if type(handle) is tuple and is_ours(saved.unpack_hook) and type(handle[0]) is Parameter:
        return handle[0]
    return tensor
