"""Attributes of modules beside weights and buffers, and what forwards leave in them.

A region that has given an attribute another value in its first run finds the earlier value in its second run, and what
the first run has left is there again afterwards. So what a module counts, it counts once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from actstore.errors import StateError
from actstore.model.names import is_of_torch
from actstore.recompute.attribute_values import (
    ABSENT,
    CONTAINERS,
    containers_of,
    copy_of,
    fill,
    has_same_content,
    hidden_by_forward,
    hidden_by_part,
    is_constant,
    is_sharded,
    names_of,
    put,
    waiting,
    waiting_value,
)  # fmt: skip
from actstore.recompute.later import LaterChanges
from actstore.recompute.reached import ReachedState
from actstore.recompute.registered import Registered
from actstore.recompute.settings import ModuleSettings

_NOTHING = nullcontext()


class AttributeChange(NamedTuple):
    """One attribute that a forward has given another value, with its value before.

    Attributes
    ----------
    version : of a tensor, when forward ended
    """

    entries: dict[str, Any]
    name: str
    was: Any
    version: int


class AttributeStates:
    """The attributes of users' modules before a forward, so that it can run with them again.

    Known are attributes that forward gives another value, and lists, dicts, sets and deques in attributes that it
    changes. Other objects that it changes inside are changed once more by each run.

    Parameters
    ----------
    modules : modules of PyTorch among them are left out: they have buffers for what they change
    settings : those of these
    once : modules that do not run again, and keep what they register
    reached : what they lead to

    Notes
    -----
    Not thread-safe: modules that change attributes must not run or be recomputed beside another thread.
    """

    __slots__ = ("_before", "_changes", "_contents", "_has_failed", "_later", "_reached", "_registered", "_settings")

    def __init__(
        self,
        modules: Sequence[Module],
        settings: ModuleSettings | None = None,
        once: Container[Module] = (),
        reached: ReachedState | None = None,
    ) -> None:
        before: list[tuple[Module, dict[str, Any], list[tuple[str, Any, Any]]]] = []
        for module in modules:
            kind: Any = type(module)
            if not is_of_torch(kind):
                entries = vars(module).copy()
                before.append((module, entries, containers_of(entries)))
        self._before: Sequence[tuple[Module, dict[str, Any], list[tuple[str, Any, Any]]]] = before
        self._later = LaterChanges(modules)
        self._registered = Registered([module for module in modules if module not in once])
        self._reached = reached
        self._settings = settings
        self._has_failed = False
        self._changes: Sequence[AttributeChange] = ()
        self._contents: Sequence[tuple[dict[str, Any], str, Any]] = ()  # no containers: these may hold the output

    def ended(self) -> None:
        """Mark the end of the forward, and drop what it has not changed."""
        contents: dict[int, tuple[dict[str, Any], str, Any]] = {}
        changes: list[AttributeChange] = []
        for module, before, containers in self._before:
            changes += _changes(module, before)
            self._later.keep(module, before, containers)
            for name, value, was in containers:
                if not has_same_content(value, was):
                    contents[id(value)] = vars(module), name, waiting(f"{type(module).__name__}.{name}", was)
        self._changes, self._contents, self._before = tuple(changes), tuple(contents.values()), ()
        self._later.ended()
        self._registered.ended()
        if self._reached is not None:
            self._reached.ended()

    def failed(self) -> None:
        """Mark the end of a forward by an error, and let go of what attributes had: it may hold the graph."""
        self._before, self._has_failed, self._registered, self._reached = (), True, Registered(()), None

    def rewound(self) -> AbstractContextManager[None]:
        """Return a context in which the attributes have their values from before the forward.

        A saved tensor that is read before the forward has ended runs it again in between.

        Raises
        ------
        StateError : a module is another one since then; or the forward ended in an error
        """
        if self._has_failed:
            raise StateError(
                "a tensor that a recomputed module has saved is read, and the forward of the module ended in an error. "
                "Run the forward again, or write keep in place of recompute."
            )
        if self._before:
            return self._paused()
        values: list[tuple[Any, str, Any]] = [*self._later.values()]
        contents = self._later.contents()
        values += self._registered.values()
        values += () if self._reached is None else self._reached.values()
        values += () if self._settings is None else self._settings.changes()
        for change in self._changes:
            is_other = isinstance(change.was, Tensor) and change.was._version != change.version
            values.append((change.entries, change.name, hidden_by_forward(change.name) if is_other else change.was))
        contents += self._contents
        return self._rewound(values, contents) if values or contents else _NOTHING

    @contextmanager
    def _paused(self) -> Iterator[None]:
        registered = self._rewound(self._registered.values(), [])
        now = [
            (module, entries := vars(module).copy(), containers_of(entries, deep=False))
            for module, _, _ in self._before
        ]
        since = RemovableHandle.next_id
        try:
            _restore(
                [(module, were, [(n, v, copy_of(was)) for n, v, was in each]) for module, were, each in self._before]
            )
            with registered:
                yield
        finally:
            for module, _, _ in now:
                _remove_hooks(vars(module), since)
            _restore(now)

    @contextmanager
    def _rewound(
        self, befores: Sequence[tuple[Any, str, Any]], earlier: list[tuple[dict[str, Any], str, Any]]
    ) -> Iterator[None]:
        """Give attributes the values `befores` until exit, and the containers in attributes `earlier` content."""
        values = [(entries, name, entries.get(name, ABSENT)) for entries, name, _ in befores]
        orders = [(entries, [*entries]) for entries in {id(entries): entries for entries, _, _ in befores}.values()]
        contents: list[tuple[Any, Any]] = []
        since = RemovableHandle.next_id
        try:
            for entries, name, was in befores:
                put(entries, name, was)
            for entries, name, was in earlier:
                value = entries.get(name, ABSENT)
                if type(value) is type(was):
                    contents.append((value, copy(value)))
                    fill(value, copy_of(was))  # it may run again once more
                else:  # the user has put another object there
                    values.append((entries, name, value))
                    put(entries, name, copy_of(was))
            yield
        finally:
            for value, content in reversed(contents):
                _remove_hooks(value, since)
                fill(value, content)
            for entries, name, now in values:
                _remove_hooks(entries.get(name), since)
                put(entries, name, now)
            for entries, names in orders:
                if isinstance(entries, dict) and [*entries] != names:
                    entries |= {name: entries.pop(name) for name in names if name in entries}


class Effects(NamedTuple):
    """Record of what an excepted part has left in attributes of its modules.

    Attributes
    ----------
    hidden : attributes that hold tensors and other objects since then, or a container that it has changed
    plain : attributes with other plain values since then; `ABSENT` for one that it has deleted
    """

    hidden: list[tuple[Module, str]]
    plain: list[tuple[Module, str, Any]]

    def repeat(self) -> None:
        """Give the attributes their plain values."""
        for module, name, value in self.plain:
            put(vars(module), name, value)


class PartAttributes:
    """The attributes of an excepted part's modules before it runs."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._before = [(module, entries := vars(module).copy(), containers_of(entries)) for module in modules]

    def effects(self) -> Effects:
        """Return what the part has changed."""
        found = Effects([], [])
        for module, before, containers in self._before:
            entries = vars(module)
            changed = {id(value) for _, value, was in containers if not has_same_content(value, was)}
            for name in names_of(before, entries):
                value = entries.get(name, ABSENT)
                if value is not before.get(name, ABSENT):
                    if value is ABSENT or is_constant(value):
                        found.plain.append((module, name, value))
                    else:
                        found.hidden.append((module, name))
                elif id(value) in changed:
                    found.hidden.append((module, name))
        return found


@contextmanager
def hidden(effects: Iterable[Effects]) -> Iterator[None]:
    """Hide for a while what excepted parts have left in attributes. Afterwards all are as before."""
    before: list[tuple[Module, str, Any]] = []
    try:
        for found in effects:
            for module, name in (*found.hidden, *((module, name) for module, name, _ in found.plain)):
                before.append((module, name, vars(module).get(name, ABSENT)))
            for module, name in found.hidden:
                vars(module)[name] = hidden_by_part(module, name)
        yield
    finally:
        for module, name, value in reversed(before):
            put(vars(module), name, value)


def _changes(module: Module, before: dict[str, Any]) -> Iterator[AttributeChange]:
    """Yield the attributes of a module that are other objects than before."""
    entries = vars(module)
    if len(before) == len(entries) and all(map(is_, before.values(), entries.values())) and [*before] == [*entries]:
        return
    for name in names_of(before, entries):
        was, now = before.get(name, ABSENT), entries.get(name, ABSENT)
        if was is now or is_sharded(was) or is_sharded(now):
            continue
        was = waiting_value(f"{type(module).__name__}.{name}", was)
        yield AttributeChange(entries, name, was, was._version if isinstance(was, Tensor) else 0)


def _restore(states: Iterable[tuple[Module, dict[str, Any], list[tuple[str, Any, Any]]]]) -> None:
    """Give modules back the attributes that they had, and containers their content."""
    for module, were, containers in states:
        entries = vars(module)
        for name in list(names_of(were, entries)):
            was, now = were.get(name, ABSENT), entries.get(name, ABSENT)
            if not (was is now or is_sharded(was) or is_sharded(now)):
                put(entries, name, was)
        for _, value, content in containers:
            fill(value, content)


def _remove_hooks(value: Any, since: int) -> None:
    """Remove each hook whose handle is about to be dropped, if it is not older than the handle with number `since`."""
    if type(value) in CONTAINERS:
        for part in value.values() if isinstance(value, dict) else value:
            _remove_hooks(part, since)
    elif isinstance(value, RemovableHandle):
        parts = getattr(value, "handles", (value,))  # a hook on several tensors has some
        if all(part.id >= since for part in parts):
            value.remove()
