"""The code of a region's modules: their classes, the forwards of instances, and hooks of forwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import is_
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from actstore.model.snapshot import AS_IT_IS, Snapshot
from actstore.model.tree import ABSENT, Entries, ModuleTree
from actstore.recompute.attribute_values import keeper, placed
from actstore.recompute.forwards import own_forward
from actstore.recompute.reached import ClassEntries

_HOOKS = "_forward_pre_hooks", "_forward_hooks"
_FLAGS = "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"
_Keeper = Callable[[Any], Any]


class NotedHook:
    """A hook in the first run of a region, which notes whether it changes something, or only observes.

    Attributes
    ----------
    changes : whether it has returned a value, written to a tensor, or set an attribute of the module
    """

    __slots__ = ("changes", "hook")

    def __init__(self, hook: Any, *, changes: bool) -> None:
        self.hook: Any = hook.hook if isinstance(hook, NotedHook) else hook  # of another thread
        self.changes = changes

    def __call__(self, module: Module, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_inference()]
        versions, values = [each._version for each in tensors], [*vars(module).values()]
        result = self.hook(module, *args, **kwargs)
        now = [*vars(module).values()]
        same = (
            versions == [each._version for each in tensors] and len(now) == len(values) and all(map(is_, now, values))
        )
        self.changes = self.changes or result is not None or not same
        return result


class HookDict:
    """A dict of hooks before the first run of a region, and its place."""

    __slots__ = ("_before", "_entries", "_name", "_noted", "hooks")

    def __init__(self, entries: Entries, name: str) -> None:
        self._entries, self._name, self.hooks = entries, name, entries[name]
        is_flag = name in _FLAGS
        self._noted = {number: NotedHook(hook, changes=is_flag) for number, hook in self.hooks.items()}
        self._before: dict[int, tuple[_Keeper, bool]] | None = None

    def note(self) -> None:
        """Put hooks in place that note what they do."""
        self.hooks.update(self._noted)

    def noted(self) -> None:
        """Put the user's back."""
        for number, each in self._noted.items():
            if self.hooks.get(number) is each:
                self.hooks[number] = each.hook

    def ended(self) -> None:
        """Keep no hook that may hold a graph."""
        noted, self._noted = self._noted, {}
        self._before = {n: (keeper(f"{self._name}[{n}]", each.hook), each.changes) for n, each in noted.items()}

    def changed(self) -> list[tuple[Entries, str, Any]]:
        """Return the place with the hooks of a second run, if they are other ones now."""
        if self._before is None:  # the first run goes on
            return []
        now = self.hooks
        then = OrderedDict((n, keep(now.get(n))) for n, (keep, changes) in self._before.items() if changes or n in now)
        same = [*then] == [*now] and all(map(is_, then.values(), now.values()))
        return [] if same else [(self._entries, self._name, then)]


class ModuleCode(Snapshot):
    """The code of a region's modules before a forward, for a second run after other code has changed it.

    A hook that has been removed since is called again where it changed something in the first run, not where it only
    observed. A new one is not called.
    """

    __slots__ = ("_forwards", "_hooks", "_tree")

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        self._forwards: list[_Keeper] = []
        for each in tree.entries:
            own = own_forward(each.attributes)
            self._forwards.append(_nothing if own is None else keeper(f"{type(each.module).__name__}.forward", own))
        self._hooks = [
            HookDict(vars(module), name) for module in tree.hooked for name in _HOOKS + _FLAGS if vars(module)[name]
        ]

    @property
    def has_hooks(self) -> bool:
        """True if the first run calls hooks."""
        return bool(self._hooks)

    def first_run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward for the first time, and note what its hooks do."""
        for each in self._hooks:
            each.note()
        try:
            return forward(*args, **kwargs)
        finally:
            for each in self._hooks:
                each.noted()

    def ended(self) -> None:
        for each in self._hooks:
            each.ended()

    def rewound(self) -> AbstractContextManager[None]:
        tree = self._tree
        values: list[tuple[Any, str, Any]] = []
        for each, kind, keep in zip(tree.entries, tree.classes, self._forwards, strict=True):
            now = own_forward(each.attributes)
            if (was := keep(now)) is not now:
                values.append((each.attributes, "forward", ABSENT if was is None else was))
            if type(each.module) is not kind:
                values.append((ClassEntries(each.module, _class_of), "__class__", kind))
        contents = [change for each in self._hooks for change in each.changed()]
        known = {id(each.hooks) for each in self._hooks}
        places = [(vars(module), name) for module in tree.modules for name in _HOOKS]
        contents += [(each, name, OrderedDict()) for each, name in places if each[name] and id(each[name]) not in known]
        return placed(values, contents) if values or contents else AS_IT_IS


def _nothing(_: Any) -> None:
    return None


def _class_of(module: Module) -> dict[str, Any]:
    return {"__class__": type(module)}
