"""Attributes of modules beside weights and buffers, and what forwards leave in them.

A region that has given an attribute another value in its first run finds the earlier value in its second run, and what
the first run has left is there again afterwards. So what a module counts, it counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from actstore.errors import StateError
from actstore.model.norms import updates
from actstore.model.snapshot import AS_IT_IS, Snapshot
from actstore.model.tree import (
    ABSENT,
    CONTAINERS,
    OF_MODULES,
    AttributeFound,
    Entries,
    ModuleTree,
    has_version,
    is_constant,
)
from actstore.model.writes import WatchedTensor, WriteHistory
from actstore.recompute.attribute_values import (
    HIDDEN,
    MAX_WAITING_LENGTH,
    can_wait,
    containers_of,
    copy_of,
    fill,
    has_same_content,
    hidden_by_code,
    hidden_by_forward,
    hidden_by_part,
    is_sharded,
    long_recognizer,
    names_of,
    placed,
    put,
    recognizer,
    remove_hooks,
    waiting,
    waiting_value,
)  # fmt: skip

_training_of = attrgetter("training")


class AttributeChange(NamedTuple):
    """One attribute that a forward has given another value, with its value before.

    Attributes
    ----------
    version : of a tensor, when forward ended
    """

    entries: Entries
    name: str
    was: Any
    version: int


class AttributeKept(NamedTuple):
    """One attribute that a forward has not changed, for a second run after other code has.

    Attributes
    ----------
    is_same : tells whether an object is the value
    value : for the second run; `HIDDEN` for a value that cannot wait
    """

    entries: Entries
    owner: str
    name: str
    is_same: Callable[[Any], bool]
    value: Any


class AttributeStates(Snapshot):
    """The entries of modules before a forward, so that it can run with them again: all but tensors under known names.

    Known are attributes that forward or other code gives another value, and lists, dicts, sets and deques in attributes
    that it changes. Other objects that it changes inside are changed once more by each run. Parameters, buffers and
    modules that it registers are absent in a second run. Those of a module that does not run again stay.

    Parameters
    ----------
    loose : attributes that the tree cannot hold

    Notes
    -----
    Not thread-safe: modules that change attributes must not run or be recomputed beside another thread.
    """

    __slots__ = (
        "_before",
        "_changes",
        "_children",
        "_contents",
        "_has_ended",
        "_kept",
        "_reached",
        "_registered",
        "_sizes",
        "_tree",
    )

    def __init__(self, tree: ModuleTree, loose: Sequence[AttributeFound] = ()) -> None:
        self._tree = tree
        self._before = [(each, copy_of(each.value) if type(each.value) in CONTAINERS else None) for each in loose]
        self._has_ended = False
        self._kept: list[AttributeKept] = []
        self._changes: list[AttributeChange] = []
        # A container that holds the same, and a copy; None where it may hold the output, as forward has changed it.
        self._contents: list[tuple[Entries, str, Any, Any]] = []
        self._children: list[tuple[Module | None, ...]] | None = None  # after a forward that has changed entries,
        self._registered: list[tuple[Entries, str, Any]] = []  # what that has registered or removed,
        self._sizes: list[int] | None = None  # and the sizes of all registries

    def ended(self) -> None:
        if not self._tree.is_current():
            self._children = [tuple(module._modules.values()) for module in self._tree.modules]
            self._registered = self._registered_now()
            self._sizes = [len(entries) for entries, _ in self._tree.registries]
        changed = set[int]()
        for found, was in self._before:
            self._keep(found, was, changed)
        self._before, self._has_ended = [], True

    def _keep(self, found: AttributeFound, was: Any, changed: set[int]) -> None:
        """Keep an attribute of the user's, and the content `was` of a container."""
        entries, owner, name, value, _ = found
        is_changed = was is not None and not has_same_content(value, was)
        if is_changed and id(value) not in changed:
            changed.add(id(value))
            self._contents.append((entries, name, None, waiting(f"{owner}.{name}", was)))
        now = entries.get(name, ABSENT)
        if is_sharded(value) or is_sharded(now):
            return
        if now is not value:
            waits = waiting_value(f"{owner}.{name}", value)
            version = waits._version if isinstance(waits, Tensor) else 0
            self._changes.append(AttributeChange(entries, name, waits, version))
        elif can_wait(value):
            if was is not None and not is_changed:
                if len(was) <= MAX_WAITING_LENGTH:
                    self._contents.append((entries, name, value, was))
                else:
                    self._kept.append(AttributeKept(entries, owner, name, long_recognizer(value), HIDDEN))
            self._kept.append(AttributeKept(entries, owner, name, partial(is_, value), value))
        elif not is_changed:
            self._kept.append(AttributeKept(entries, owner, name, recognizer(value), HIDDEN))

    def rewound(self) -> AbstractContextManager[None]:
        """Return a context in which all entries are those from before the forward.

        A saved tensor that is read before the forward has ended runs it again in between.

        Raises
        ------
        StateError : a module is another one since then
        """
        values: list[tuple[Any, str, Any]] = [] if self._tree.is_current() else self._other_entries()
        contents: list[tuple[Entries, str, Any]] = []
        for found, was in self._before:
            if found.entries.get(found.name, ABSENT) is not found.value and not is_sharded(found.value):
                values.append((found.entries, found.name, found.value))
            if was is not None and not has_same_content(found.value, was):
                contents.append((found.entries, found.name, was))
        for entries, owner, name, is_same, value in self._kept:
            now = entries.get(name, ABSENT)
            if not is_same(now) and not is_sharded(now):
                values.append((entries, name, hidden_by_code(f"{owner}.{name}") if value is HIDDEN else value))
        for change in self._changes:
            is_other = isinstance(change.was, Tensor) and change.was._version != change.version
            values.append((change.entries, change.name, hidden_by_forward(change.name) if is_other else change.was))
        for entries, name, value, was in self._contents:
            if value is None or (entries.get(name, ABSENT) is value and not has_same_content(value, was)):
                contents.append((entries, name, was))
        inner = placed(values, contents) if values or contents else AS_IT_IS
        return UndoneAttributes(self._tree, inner) if self._tree.of_users else inner

    def undo(self, since: int) -> None:
        """Give all plain attributes their values from before the forward, and remove hooks that are newer than `since`.

        A second run has found these values, and changed some.
        """
        for each in self._tree.entries:
            if not each.is_of_torch:
                of_modules = {name: value for name, value in each.attributes.items() if name in OF_MODULES}
                _restore(each.attributes, of_modules | each.plain, since)
            elif "training" in each.plain:
                each.module.training = each.plain["training"]

    def _other_entries(self) -> list[tuple[Entries, str, Any]]:
        """Return the entries that are other ones now, with those for the second run."""
        if self._has_ended:
            self._check_children()
        values: list[tuple[Entries, str, Any]] = []
        for each in self._tree.entries:
            attributes = each.attributes
            for name, was in each.plain.items():
                now = attributes.get(name, ABSENT)
                if now is not was and not (isinstance(now, Tensor) if each.is_of_torch else is_sharded(now)):
                    values.append((attributes, name, was))
            if not each.is_of_torch:
                new = attributes.keys() - each.names - OF_MODULES
                values += [(attributes, name, ABSENT) for name in new if not is_sharded(attributes[name])]
            for entries, before in each.registries:  # what is gone, and tensors that take its place
                gone = [name for name in before.keys() - entries.keys() if not is_sharded(attributes.get(name))]
                values += [(entries, name, before[name]) for name in gone]
                values += [(attributes, name, ABSENT) for name in gone if isinstance(attributes.get(name), Tensor)]
        if not self._has_ended:
            return values + self._registered_now()
        sizes = [len(before) for _, before in self._tree.registries] if self._sizes is None else self._sizes
        later = [
            (entries, name)
            for (entries, _), size in zip(self._tree.registries, sizes, strict=True)
            for name in [*entries][size:]
        ]
        values += self._registered
        return values + [(entries, name, ABSENT) for entries, name in later if not is_sharded(entries[name])]

    def _registered_now(self) -> list[tuple[Entries, str, Any]]:
        """Return the entries registered or removed since before the forward. `Weights` has other tensors."""
        found = []
        for entries, before in self._tree.registries:
            for name in {**before, **entries}:
                was, now = before.get(name, ABSENT), entries.get(name, ABSENT)
                is_other = was is not now and (isinstance(was, Module) or was is ABSENT or now is ABSENT)
                if is_other and not (is_sharded(was) or is_sharded(now)):
                    found.append((entries, name, was))
        return found

    def _check_children(self) -> None:
        """Check that each module holds the modules that forward has left in it. Of more, the second run knows none."""
        for i, each in enumerate(self._tree.entries):
            now, before = each.module._modules, each.registries[-1][1]
            were = tuple(before.values()) if self._children is None else self._children[i]
            if len(now) < len(were) or not all(map(is_, now.values(), were)):
                names = [name for name, was in zip(now, were, strict=False) if now[name] is not was]
                raise StateError(
                    f"module={type(each.module).__name__}.{names[0] if names else ''}: it was replaced between forward "
                    "and backward, and a recomputed module must run as in forward. Replace it after backward, or write "
                    "keep in place of recompute."
                )


class UndoneAttributes:
    """Context that leaves attributes as it finds them. A run that ends early has not undone its own changes.

    Parameters
    ----------
    inner : another context
    """

    __slots__ = ("_containers", "_inner", "_now", "_since", "_training", "_tree")

    def __init__(self, tree: ModuleTree, inner: AbstractContextManager[None]) -> None:
        self._tree = tree
        self._inner = inner

    def __enter__(self) -> None:
        self._now = [*map(dict.copy, self._tree.of_users)]
        self._training = [*map(_training_of, self._tree.modules)]
        loose = [each.value for each in self._tree.loose()]
        self._containers = [(each, copy_of(each)) for each in loose if type(each) in CONTAINERS]
        self._since = RemovableHandle.next_id
        self._inner.__enter__()

    def __exit__(self, *exc: Any) -> None:
        try:
            self._inner.__exit__(*exc)
        finally:
            if [*map(_training_of, self._tree.modules)] != self._training:
                for module, was in zip(self._tree.modules, self._training, strict=True):
                    module.training = was
            for value, content in self._containers:
                if not has_same_content(value, content):
                    remove_hooks(value, self._since)
                    fill(value, content)
            for entries, were in zip(self._tree.of_users, self._now, strict=True):
                if len(entries) != len(were) or not all(map(is_, entries.values(), were.values())):
                    _restore(entries, were, self._since)


def _restore(entries: Entries, were: Entries, since: int) -> None:
    """Give a module's own attributes back their values."""
    for name in list(names_of(were, entries)):
        was, now = were.get(name, ABSENT), entries.get(name, ABSENT)
        if not (was is now or is_sharded(was) or is_sharded(now)):
            remove_hooks(now, since)
            put(entries, name, was)


class Effects(NamedTuple):
    """Record of what an excepted part has left in attributes and buffers of its modules.

    Attributes
    ----------
    hidden : attributes that hold tensors and other objects since then, or a container that it has changed
    plain : attributes with other plain values since then; `ABSENT` for one that it has deleted
    tensors : buffers that it has written to or replaced, and attributes with tensors that it has written to
    """

    hidden: list[tuple[Module, str]]
    plain: list[tuple[Module, str, Any]]
    tensors: list[TensorChange]

    def repeat(self) -> None:
        """Give the attributes their plain values, and the tensors theirs."""
        for module, name, value in self.plain:
            put(vars(module), name, value)
        for each in self.tensors:
            each.repeat()


class TensorChange(NamedTuple):
    """A tensor that an excepted part has written to or replaced.

    Attributes
    ----------
    entries : the buffers or attributes of the module
    was : the tensor before
    now : a copy of what it is since then
    is_written : whether that is the same tensor with other values
    """

    module: Module
    entries: Entries
    name: str
    was: Tensor | None
    now: Tensor | None
    is_written: bool

    def hide(self) -> None:
        """Make the tensor one that `repeat` may write to; where nothing has its values from before, its use fails."""
        if self.is_written:
            found = self.entries.get(self.name)
            if isinstance(found, Tensor) and found is not self.was:
                self.entries[self.name] = found.detach().clone()
            else:
                self.entries[self.name] = hidden_by_part(self.module, self.name)

    def repeat(self) -> None:
        """Give the tensor its values after the part."""
        found = self.entries.get(self.name)
        if self.is_written and isinstance(found, Tensor) and self.now is not None:
            with torch.no_grad():
                found.copy_(self.now)
        else:
            self.entries[self.name] = None if self.now is None else self.now.clone()


class PartAttributes:
    """The attributes and buffers of an excepted part's modules before it runs.

    Parameters
    ----------
    history : what earlier calls of the part have written to; None to leave tensors that it writes to out
    """

    def __init__(self, modules: Iterable[Module], history: WriteHistory | None = None) -> None:
        self._before = [(module, entries := vars(module).copy(), containers_of(entries)) for module in modules]
        self._history = history
        self._training = any(module.training for module, *_ in self._before)
        self._tensors: list[tuple[Module, WatchedTensor]] = []
        if history is not None:
            fresh = self._training not in history.ended
            self._tensors = [
                (module, WatchedTensor(entries, name, each, each._version, each.detach().clone() if fresh else None))
                for module, *_ in self._before
                for entries in (module._buffers, vars(module))
                for name, each in entries.items()
                if isinstance(each, Tensor) and has_version(each)
            ]

    def effects(self) -> Effects:
        """Return what the part has changed."""
        found = Effects([], [], [])
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
        if self._history is None:
            return found
        written = self._history.end([each for _, each in self._tensors], training=self._training)
        keys = {each.key for each in written}
        for module, each in self._tensors:
            now = each.entries.get(each.name)
            is_written = now is each.tensor and (each.key in keys or updates(module, each.name))
            if is_written or (now is not each.tensor and each.entries is module._buffers):
                copy = None if now is None else now.detach().clone()
                found.tensors.append(TensorChange(module, each.entries, each.name, each.tensor, copy, is_written))
        return found


@contextmanager
def hidden(effects: Iterable[Effects]) -> Iterator[None]:
    """Hide for a while what excepted parts have left in attributes and buffers. Afterwards all are as before."""
    before: list[tuple[Entries, str, Any]] = []
    try:
        for found in effects:
            names = [(vars(module), name) for module, name in found.hidden]
            names += [(vars(module), name) for module, name, _ in found.plain]
            names += [(each.entries, each.name) for each in found.tensors]
            before += [(entries, name, entries.get(name, ABSENT)) for entries, name in names]
            for module, name in found.hidden:
                vars(module)[name] = hidden_by_part(module, name)
            for each in found.tensors:
                each.hide()
        yield
    finally:
        for entries, name, value in reversed(before):
            put(entries, name, value)
