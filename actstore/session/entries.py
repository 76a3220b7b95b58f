"""Entries of stores on this thread, and functions that need the innermost one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from threading import local
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._autograd import _pop_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from actstore.autograd import modules
from actstore.autograd.hooks import Scope
from actstore.autograd.unpack import unpack
from actstore.base.checkpoints import innermost_pack
from actstore.errors import StateError
from actstore.policy.pattern import check_tag
from actstore.recompute.checkpoints import end_left

if TYPE_CHECKING:
    from actstore.base.ledger import Ledger
    from actstore.recompute.replay import Calls
    from actstore.session.controllers import StepPolicy

_thread = local()  # .entries: of all stores on this thread, the innermost last


def _seen(ledger: Ledger) -> int:
    """Return a number that grows with each tensor that the entries of a step have seen."""
    return sum(account.count + account.saved for account in ledger.accounts())


class StoreEntry:
    """One entry of one store on one thread, with the undos of all that it has registered.

    Attributes
    ----------
    owner : the store
    scope : the state of its hooks
    calls : recomputed calls; made with the first wrapped module
    pack : its pack hook
    undos : noted before their registrations, the last one first in `unwind`. An interrupt can come before or after any
        of them: each is harmless where nothing is registered, and where it runs again
    error : the exception with which the entry ends
    inner : another store that acted inside of it; None for none
    before : tensors that earlier entries of the step have seen, or the last step where this entry is an evaluation
    """

    __slots__ = ("before", "calls", "error", "inner", "owner", "pack", "scope", "undos")

    calls: Calls

    def __init__(self, owner: object, scope: Scope, controller: StepPolicy | None, *, first: bool = True) -> None:
        self.owner = owner
        self.scope = scope
        self.pack = scope.entry_hook() if controller is None else controller.watching(scope.entry_hook())
        self.undos: list[Callable[[], object]] = []
        self.error: BaseException | None = None
        self.inner: object = None
        self.before = 0 if first else _seen(scope.ledger)

    @property
    def has_acted(self) -> bool:
        """True where it has seen a tensor."""
        return _seen(self.scope.ledger) != self.before

    def activate(self) -> None:
        """Make this the innermost entry of the thread, with its tracker and its hooks."""
        tracker = self.scope.tracker
        self.undos.append(partial(modules.stop, tracker, modules.current()))
        modules.start(tracker)
        self.undos.append(self._deactivate)
        entries().append(self)
        hook = modules.lasting(unpack) if "torch._dynamo" in sys.modules else unpack
        saved_tensors_hooks(self.pack, hook).__enter__()

    def _deactivate(self) -> None:
        found = entries()
        if found and found[-1] is self:
            found.pop()
        if innermost_pack() is self.pack:
            _pop_saved_tensors_default_hooks()

    def close(self) -> None:
        """End its scope, which encodes nothing more after an error."""
        self.scope.close(failed=self.error is not None)

    def unwind(self, error: BaseException | None) -> None:
        """Run all undos, also after one has failed. After an interrupt, a second call goes on where the first ended."""
        self.error = error
        while self.undos:
            try:
                self.undos[-1]()
            except Exception:
                self.undos.pop()
                self.unwind(error)
                raise
            self.undos.pop()  # an interrupt before this runs the undo again
        self.error = None  # its traceback has this entry


def entries() -> list[StoreEntry]:
    """Return the entries of this thread, the innermost last."""
    found: list[StoreEntry] | None = getattr(_thread, "entries", None)
    if found is None:
        found = _thread.entries = []
    return found


def innermost_of(owner: object) -> StoreEntry | None:
    """Return the innermost entry of this thread, if it is one of `owner`."""
    found = entries()
    return found[-1] if found and found[-1].owner is owner else None


def entry_to_leave(owner: object, error: BaseException | None) -> StoreEntry:
    """Return the innermost entry of this thread, which must be of `owner`.

    Raises
    ------
    StateError : it is not, or other hooks are inside of it
    """
    found = entries()
    if not found or found[-1].owner is not owner:
        raise StateError(
            "a store was left on a thread where it is not the innermost one that was entered. "
            "Leave stores in the reverse order, each on the thread that entered it.",
            expected=found[-1].owner if found else None,
        )
    entry = found[-1]
    if error is not None:
        end_left(error, entry.pack)
    pack = innermost_pack()
    if pack is not entry.pack:
        raise StateError(
            "other saved-tensor hooks were entered inside this store's context and not left before it. "
            "Leave contexts in the reverse order.",
            hooks=pack,
        )
    return entry


def is_active() -> bool:
    """Return whether a store is entered on this thread."""
    return bool(entries())


def check_nested(entry: StoreEntry) -> None:
    """Check that an entry that was left has acted, where another store was entered inside of it.

    Raises
    ------
    StateError : the inner store has seen all tensors, as in ``with outer, inner:``
    """
    acted = entry.has_acted
    if acted and entries() and entries()[-1].owner is not entry.owner:
        entries()[-1].inner = entry.owner
    if entry.inner is not None and not acted:
        raise StateError(
            f"{entry.owner!r} has seen no tensor, because {entry.inner!r} was entered inside of its context: the inner "
            "store alone acts. Enter each store around the forward of its own model, or give one store the rules of "
            "both.",
            inner=entry.inner,
        )


def tag_now(tensor: Tensor, name: str) -> Tensor:
    """Name a tensor in the innermost entry of this thread, as `actstore.tag` does outside of compiled code."""
    from actstore.recompute import running

    check_tag(name)
    run = running.current()
    if run is not None and run.tag is not None:
        tensor = run.tag(tensor, name)
    found = entries()
    if found:
        found[-1].scope.storages.tag(tensor, name)
    return tensor


def refuse_checkpointed_region() -> None:
    """Refuse to enter a store inside a checkpointed region, where it would save all that the checkpoint drops.

    Raises
    ------
    StateError : a checkpointed region or a backward runs on this thread
    """
    module = getattr(innermost_pack(), "__module__", "")
    inside = module == "torch.utils.checkpoint" or module.startswith("actstore.recompute.")
    if inside or torch._C._current_graph_task_id() != -1:
        where = "a checkpointed region" if inside else "a running backward (a checkpoint recomputes there)"
        raise StateError(
            f"a store was entered inside {where}: it would save what the checkpoint is to recompute. Enter the store "
            "outside, around the checkpointed forward. It then stores the inputs of the regions."
        )
