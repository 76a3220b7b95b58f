"""The unpack hook, the scopes that need to know when backward starts, and the Parameters that a Function gets back."""

from __future__ import annotations

from contextlib import suppress
from sys import modules
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _current_autograd_node, _current_graph_task_id
from torch.nn import Parameter

from actstore.autograd.composite import Composite
from actstore.autograd.deciders import caller
from actstore.autograd.derived import Derived
from actstore.autograd.handles import Kept, Small, Stored, check_version
from actstore.autograd.readers import Reader
from actstore.autograd.tracker import SMALL_INDEX
from actstore.base.call_site import applied
from actstore.base.spec import Site

COMPILER = "torch._functorch._aot_autograd.runtime_wrappers"  # imported with the first compiled region

Handle = Small | Kept | Stored | Derived | Composite


class Turning(Protocol):
    """A scope that needs to know when a backward begins.

    Attributes
    ----------
    thread : of its forward
    on_accelerator : whether backward runs on autograd's threads
    """

    thread: int
    on_accelerator: bool

    def turn(self, thread: int) -> None:
        """Note that backward begins, on `thread`."""


turns: list[Turning] = []


def unpack(handle: Handle | Reader) -> Tensor:
    """Return the tensor of a handle, as it was saved."""
    if turns:
        _turn()
    if type(handle) is tuple:
        alias, version, frame = handle
        if alias._version != version:
            is_weight = alias.untyped_storage().nbytes() >= frame.keep_below  # other tensors of that size have sites
            check_version(alias, version, Site(frame.place.name, SMALL_INDEX), is_weight=is_weight)
        return alias
    tensor = handle.get()  # type: ignore[union-attr]
    if COMPILER in modules:
        _note_compiled(handle, tensor)
    return tensor


def is_ours(hook: Any) -> bool:
    """Return whether an unpack hook is a store's: `unpack`, or a copy of it."""
    return getattr(hook, "__code__", None) is unpack.__code__


def forget_turn(scope: Turning) -> None:
    """Forget a scope that has ended, where no backward has begun."""
    with suppress(ValueError):
        turns.remove(scope)


def _turn() -> None:
    """Tell scopes of this thread that backward begins. On an accelerator it runs on autograd's threads."""
    here = get_ident()
    for scope in turns[:]:
        if scope.thread == here or scope.on_accelerator:
            with suppress(ValueError):  # another thread has removed it
                turns.remove(scope)
                scope.turn(here)


def _note_compiled(handle: Handle | Reader, tensor: Tensor) -> None:
    node: Any = _current_autograd_node()  # None outside of backward
    if node is None or node.name() != "CompiledFunctionBackward":
        return
    if isinstance(handle, Reader):
        handle = handle.handle
    if isinstance(handle, Stored) and handle.alias is None:
        owner = handle.owner or handle
        key = _current_graph_task_id(), node._sequence_nr()
        owner.store.ledger.read_compiled(handle.account, key, tensor.nbytes if owner is handle else 0)


_C_FUNCTION: Any = torch._C._FunctionBase


def return_originals() -> None:
    """Let the Function that saves a tensor now, if a Function does, return the Parameters that it saves themselves.

    PyTorch makes a new tensor of what an unpack hook returns. That has none of the attributes that code puts on
    Parameters, such as the `main_grad` of Megatron-LM. The handle of a Parameter holds the Parameter itself, and so a
    Function that has saved one with attributes gets that from `ctx.saved_tensors`, as without a store.
    """
    frame = caller()
    function: Any = None if frame is None else applied(frame)
    if function is not None:
        node = function._backward_cls
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
