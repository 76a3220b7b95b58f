"""The name of the module that is running, per thread, while some store is active.

Two hooks common to all modules are registered while at least one store is active, and none otherwise; nothing is
attached to a model, so that it can be copied and pickled at any time.
"""

from __future__ import annotations

from threading import Lock, local
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from actstore.ledger import Account, Ledger
from actstore.policy import Decision
from actstore.spec import Site

if TYPE_CHECKING:
    from collections.abc import Iterable


class Place:
    """What is remembered of one module name: its accounts in the order of its saves, and its decision."""

    __slots__ = ("_ledger", "accounts", "decision", "name")

    def __init__(self, name: str, ledger: Ledger, decision: Decision | None) -> None:
        self.name = name
        self.accounts: list[Account] = []
        self.decision = decision  # None: ask the policy for each tensor
        self._ledger = ledger

    def account(self, index: int) -> Account:
        accounts = self.accounts
        while index >= len(accounts):
            accounts.append(self._ledger.account(Site(self.name, len(accounts))))
        return accounts[index]


class Frame:
    """One call of a module: its place, how many tensors it has saved, and the decision for a region's inputs."""

    __slots__ = ("index", "inputs", "module", "place")

    def __init__(self, module: Module | None, place: Place, inputs: Decision | None = None) -> None:
        self.module = module
        self.place = place
        self.inputs = inputs
        self.index = 0


class Tracker:
    """The modules that are running on one thread under one entry of a store."""

    __slots__ = ("frame", "places", "stack")

    def __init__(self, places: dict[Module, Place], top: Place) -> None:
        self.places = places
        self.stack: list[Frame] = []
        self.frame = Frame(None, top)

    def push(self, frame: Frame) -> None:
        self.stack.append(self.frame)
        self.frame = frame

    def pop(self) -> None:
        self.frame = self.stack.pop()


_active = local()
_lock = Lock()
_users = 0
_handles: list[Any] = []


def _before(module: Module, _: Any) -> None:
    tracker: Tracker | None = getattr(_active, "tracker", None)
    if tracker is not None:
        place = tracker.places.get(module)
        if place is not None:
            tracker.push(Frame(module, place))


def _after(module: Module, _args: Any, _output: Any) -> None:
    tracker: Tracker | None = getattr(_active, "tracker", None)
    if tracker is not None and tracker.frame.module is module:
        tracker.pop()


def start(tracker: Tracker) -> Tracker | None:
    """Follow modules of this thread with `tracker`; returns the one that did so before."""
    global _users  # noqa: PLW0603  # one registration for the whole process
    with _lock:
        _users += 1
        if _users == 1:
            _handles.append(register_module_forward_pre_hook(_before))
            _handles.append(register_module_forward_hook(_after, always_call=True))
    before: Tracker | None = getattr(_active, "tracker", None)
    _active.tracker = tracker
    return before


def stop(before: Tracker | None) -> None:
    """End what `start` began and go back to the tracker it returned."""
    global _users  # noqa: PLW0603
    _active.tracker = before
    with _lock:
        _users -= 1
        if _users == 0:
            while _handles:
                _handles.pop().remove()


_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def named_modules(model: Module) -> Iterable[tuple[str, Module]]:
    """(name, module), each module once, parents before children; without the levels that wrappers add to names."""
    parallel = type(model).__name__ in ("DistributedDataParallel", "DataParallel")
    for name, module in model.named_modules():
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        if parallel and parts and parts[0] == "module":
            del parts[0]
        yield ".".join(parts), module
