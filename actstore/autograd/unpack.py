"""The unpack hook, and the scopes that need to know when a backward begins."""

from __future__ import annotations

from contextlib import suppress
from sys import modules
from threading import get_ident
from typing import Any, Protocol

from torch import Tensor
from torch._C import _current_autograd_node, _current_graph_task_id

from actstore.autograd.composite import Composite
from actstore.autograd.derived import Derived
from actstore.autograd.handles import Kept, Small, Stored, check_version
from actstore.autograd.readers import Reader
from actstore.autograd.tracker import SMALL_INDEX
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
