"""State outside of a region that its forward can read: objects in attributes, closures of functions, and classes."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from copy import copy
from functools import lru_cache, partial
from itertools import repeat
from operator import attrgetter, is_
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor
from torch.nn import Module

from actstore.model.generators import has_state
from actstore.model.snapshot import AS_IT_IS, Snapshot
from actstore.model.tree import (
    ABSENT,
    CONSTANTS,
    CONTAINERS,
    OF_MODULES,
    AttributeFound,
    ModuleTree,
    has_variables,
    is_constant,
)  # fmt: skip
from actstore.recompute.attribute_values import (
    MAX_WAITING_LENGTH,
    can_wait,
    copy_of,
    has_same_content,
    hidden_by_code,
    is_sharded,
    placed,
    recognizer,
)
from actstore.recompute.forwards import own_forward

MAX_DEPTH = 4  # of objects in objects
MAX_OBJECTS = 64  # of a region: each takes some microseconds of each forward
_Entries = MutableMapping[str, Any]
_Other = tuple[str, Any, int]  # a name, a value that is not plain, and its kind
_LEAF, _PLAIN, _TENSOR, _GENERATOR, _CONTAINER, _FUNCTION, _OBJECT = range(7)
_FRAMEWORKS = {"deepspeed", "accelerate", "lightning", "pytorch_lightning"}  # they count runs of modules
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "actstore", "numpy"} | _FRAMEWORKS


class ReachedState(Snapshot):
    """Values that a forward can reach outside of its modules, for a second run after other code has changed them.

    Plain values come back. So do tensors that other code has replaced, if they can wait. The use of another value that
    it has replaced, or of a tensor that it has written to, is an error. What the forward itself changes is left alone.

    Parameters
    ----------
    tree : the modules of the region: their attributes are not among the values, but what these lead to, as context
        variables do
    loose : attributes of these that are not plain

    Attributes
    ----------
    generators : of random numbers, in objects, closures and containers
    is_steady : whether all are plain values, which the forward has left as they were
    """

    __slots__ = ("_has_ended", "_others", "_plain", "_seen", "generators", "is_steady")

    def __init__(self, tree: ModuleTree, loose: Iterable[AttributeFound]) -> None:
        self.generators: list[Any] = []
        self._has_ended = self.is_steady = False
        self._plain: list[_PlainValues] = []
        self._others: list[_Known] = []
        self._seen = set(map(id, tree.modules))
        for kind in tree.kinds:
            self._visit_class(kind)
        for entries, owner, name, value, _ in loose:
            kind = _kind_of(type(value))
            if kind >= _CONTAINER:
                if kind == _CONTAINER and (known := _versions_in(value)):
                    self._others.append(_Known(entries, name, owner, partial(_are_unwritten, known), _nothing))
                self._visit(value, kind, 0)
        for forward in filter(None, [own_forward(each.attributes) for each in tree.entries]):
            self._visit(forward, _kind_of(type(forward)), 0)
        for module in tree.hooked:
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                self._visit(hook, _kind_of(type(hook)), 0)
        for value in copy_context().values():
            self._visit(value, _kind_of(type(value)), 0)

    def ended(self) -> None:
        """Mark the end of the forward, and drop all that it changed."""
        before, self._plain = self._plain, [each.of_now() for each in self._plain]
        same = all(len(now.plain) == len(was.plain) for now, was in zip(self._plain, before, strict=True))
        self.is_steady = same and not (self._others or self.generators)
        self._others = [each for each in self._others if each.is_same(each.entries.get(each.name, ABSENT))]
        self._seen = set()
        self.generators = []
        self._has_ended = True

    def plain(self) -> list[tuple[Mapping[str, Any], list[str]]]:
        """Return the entries in which plain values are, and the names of these."""
        return [(each.entries.view(), [*each.plain]) for each in self._plain]

    def before(self) -> ReachedState:
        """Return the values of a steady state before one more forward."""
        own = copy(self)
        own._has_ended = False
        return own

    def is_same(self) -> bool:
        """Return whether the values of a steady state are the same now."""
        return all(each.is_current() for each in self._plain)

    def rewound(self) -> AbstractContextManager[None]:
        """Return a context with the values that are other ones now. Before the forward has ended, that may go on."""
        values = self._values() if self._has_ended else ()
        return placed(values, ()) if values else AS_IT_IS

    def _values(self) -> list[tuple[_Entries, str, Any]]:
        """Return the values that are other ones now, with those for the second run."""
        found = [change for each in self._plain if not each.is_current() for change in each.changes()]
        for each in self._others:
            now = each.entries.get(each.name, ABSENT)
            if not (each.is_same(now) or is_sharded(now) or _is_distributed(now)):
                was = each.waiting()
                hidden = hidden_by_code(f"{each.owner}.{each.name}") if was is ABSENT else was
                found.append((each.entries, each.name, hidden))
        return found

    def _visit(self, value: Any, kind: int, depth: int) -> None:
        """Visit what a value leads to."""
        if kind == _GENERATOR:
            self.generators.append(value)
        if kind < _CONTAINER or depth > MAX_DEPTH or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if kind == _CONTAINER:
            for part in _parts(value):
                if (found := _kind_of(type(part))) > _TENSOR:
                    self._visit(part, found, depth + 1)
        elif kind == _FUNCTION:
            self._visit_function(value, depth)
        elif len(self._plain) < MAX_OBJECTS:
            name = type(value).__name__
            self._visit_class(type(value))
            self._visit_entries(ReachedEntries(value), name, depth)
            if isinstance(value, Module):
                self._visit_entries(ReachedEntries(value, attrgetter("_parameters")), name, depth)
                self._visit_entries(ReachedEntries(value, attrgetter("_buffers")), name, depth)

    def _visit_class(self, kind: type) -> None:
        for each in _users_classes(kind):
            if id(each) not in self._seen:
                self._seen.add(id(each))
                state = _class_state(each)
                if not state.is_current():
                    state.read()
                self._plain.append(_PlainValues(state.entries, state.plain))
                self._visit_others(state.entries, state.rest, each.__name__, 1)

    def _visit_function(self, function: Any, depth: int) -> None:
        if isinstance(function, MethodType):
            self._visit(function.__self__, _kind_of(type(function.__self__)), depth + 1)
            function = function.__func__
        if isinstance(function, partial):
            for value in (function.func, *function.args, *function.keywords.values()):
                self._visit(value, _kind_of(type(value)), depth + 1)
        elif has_variables(function) and _is_users(function):
            self._visit_entries(CellEntries(function), function.__qualname__, depth)

    def _visit_entries(self, entries: ReachedEntries, owner: str, depth: int) -> None:
        plain, rest = _split(entries.view())
        self._plain.append(_PlainValues(entries, plain))
        self._visit_others(entries, rest, owner, depth)

    def _visit_others(self, entries: _Entries, others: Iterable[_Other], owner: str, depth: int) -> None:
        for name, value, kind in others:
            if kind != _GENERATOR and not _is_distributed(value):
                self._others.append(_Known(entries, name, owner, *_recognizer(value, kind)))
            if kind > _TENSOR:
                self._visit(value, kind, depth + 1)


class _PlainValues(NamedTuple):
    """Plain values of an object, a class or a closure.

    Attributes
    ----------
    plain : the values
    names : of all entries, when forward ended; None before
    """

    entries: ReachedEntries
    plain: dict[str, Any]
    names: tuple[str, ...] | None = None

    def is_current(self) -> bool:
        """Return whether the values are the same now, and no entry is new; or the owner is gone."""
        view = self.entries.view()
        same = all(map(is_, map(view.get, self.plain, repeat(ABSENT)), self.plain.values()))
        return (same and (self.names is None or len(self.names) == len(view))) or self.entries.are_gone

    def of_now(self) -> _PlainValues:
        """Return the values that are the same now, with all names of now."""
        plain, view = self.plain, self.entries.view()
        if not self.is_current():
            plain = {name: was for name, was in plain.items() if view.get(name, ABSENT) is was}
        return _PlainValues(self.entries, plain, tuple(view))

    def changes(self) -> Iterator[tuple[_Entries, str, Any]]:
        """Yield the entries that are other ones now, with the values before."""
        view = self.entries.view()
        for name, was in self.plain.items():
            if view.get(name, ABSENT) is not was:
                yield self.entries, name, was
        for name in () if self.names is None else {*view} - {*self.names}:
            if not name.startswith("__"):  # Python adds annotations to a class where these are read
                yield self.entries, name, ABSENT


class _Known(NamedTuple):
    """A value that is not plain, with its place and the name of its owner.

    Attributes
    ----------
    is_same : tells whether an object is the value, and no other code has written to it
    waiting : returns the value for the second run; `ABSENT` for none
    """

    entries: _Entries
    name: str
    owner: str
    is_same: Callable[[Any], bool]
    waiting: Callable[[], Any]


class _ClassState:
    """The attributes of a class, sorted: read again after a change."""

    __slots__ = ("_values", "_view", "entries", "plain", "rest")

    def __init__(self, kind: type) -> None:
        self.entries, self._view = ClassEntries(kind), vars(kind)
        self.read()

    def read(self) -> None:
        self._values = [*self._view.values()]
        self.plain, self.rest = _split({n: each for n, each in self._view.items() if not n.startswith("__")}, ())

    def is_current(self) -> bool:
        """Return whether the attributes are those that were read."""
        return len(self._view) == len(self._values) and all(map(is_, self._view.values(), self._values))


@lru_cache(maxsize=4096)
def _kind_of_class(kind: Any) -> int:
    """Return what to do with values of a class."""
    if issubclass(kind, (*CONSTANTS, BuiltinFunctionType, type)):
        return _PLAIN
    if issubclass(kind, FunctionType | MethodType | partial):
        return _FUNCTION
    if issubclass(kind, Tensor):
        return _TENSOR
    if has_state(kind):
        return _GENERATOR
    if kind in CONTAINERS or issubclass(kind, tuple):
        return _CONTAINER
    known = kind in (SimpleNamespace, Namespace) or issubclass(kind, Module)
    has_entries = any("__dict__" in vars(base) for base in kind.__mro__)
    return _OBJECT if has_entries and (known or _is_users(kind)) else _LEAF


_kind_of: Callable[[Any], int] = _kind_of_class


@lru_cache(maxsize=4096)
def _users_classes(kind: Any) -> tuple[type, ...]:
    """Return the classes of the user's among a class and its bases."""
    return tuple(filter(_is_users, kind.__mro__))


@lru_cache(maxsize=1024)
def _class_state(kind: Any) -> _ClassState:
    return _ClassState(kind)


def _split(
    entries: Mapping[str, Any], left_out: Container[str] = OF_MODULES - {"training"}
) -> tuple[dict[str, Any], list[_Other]]:
    """Return the plain values among entries, and the rest. Functions are plain that read no variables around them."""
    kinds = [*map(_kind_of, map(type, entries.values()))]
    if set(kinds) == {_PLAIN}:
        return dict(entries), []
    plain: dict[str, Any] = {}
    rest: list[_Other] = []
    for (name, value), kind in zip(entries.items(), kinds, strict=True):
        if kind == _LEAF or name in left_out:
            continue
        is_function = isinstance(value, FunctionType) and not has_variables(value)
        if kind == _PLAIN or is_function or (kind == _CONTAINER and is_constant(value)):
            plain[name] = value
        else:
            rest.append((name, value, kind))
    return plain, rest


def _parts(value: Any) -> Sequence[Any]:
    """Return what a container holds; nothing of a long one."""
    if len(value) > MAX_WAITING_LENGTH:
        return ()
    return [*value.values()] if isinstance(value, dict) else [*value]


def _versions_in(value: Any, depth: int = 0) -> list[tuple[ref[Tensor], int]]:
    """Return the tensors in a container, with their versions."""
    found = []
    for part in _parts(value):
        if isinstance(part, Tensor):
            found += [] if part.is_inference() else [(ref(part), part._version)]
        elif depth < MAX_DEPTH and _kind_of(type(part)) == _CONTAINER:
            found += _versions_in(part, depth + 1)
    return found


def _are_unwritten(known: list[tuple[ref[Tensor], int]], _: Any) -> bool:
    return all((tensor := weak()) is None or tensor._version == version for weak, version in known)


def _recognizer(value: Any, kind: int) -> tuple[Callable[[Any], bool], Callable[[], Any]]:
    """Return what tells whether a value is the same, and what returns that for the second run."""
    if kind == _TENSOR:
        weak, version = ref(value), 0 if value.is_inference() else value._version
        is_unwritten = partial(_are_unwritten, [(weak, version)] if not value.is_inference() else [])
        waiting = partial(_waiting_tensor, value, version) if can_wait(value) else _nothing
        return lambda now: now is weak() and is_unwritten(now), waiting
    if kind != _CONTAINER:
        return recognizer(value), _nothing
    if type(value) in CONTAINERS and len(value) <= MAX_WAITING_LENGTH and all(map(is_constant, _parts(value))):
        was = copy_of(value)
        return lambda now: type(now) is type(was) and has_same_content(now, was), partial(copy_of, was)
    is_it, known = recognizer(value), _versions_in(value)
    return lambda now: is_it(now) and _are_unwritten(known, now), _nothing


def _is_distributed(value: Any) -> bool:
    """Return whether a value is a DTensor: FSDP2 puts these into modules, and takes them away."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def _waiting_tensor(tensor: Tensor, version: int) -> Any:
    return tensor if tensor._version == version else ABSENT


def _nothing() -> Any:
    return ABSENT


def _is_users(each: Any) -> bool:
    """Return whether a class or a function is the user's own."""
    return (each.__module__ or "").partition(".")[0] not in _FOREIGN


class ReachedEntries(MutableMapping[str, Any]):
    """The attributes of an object, of a class, or one of the dicts of a module.

    An object is known by a weak reference, as what it holds may hold the graph that this belongs to. It has no entries
    when it is gone.

    Parameters
    ----------
    view : returns the entries of the owner, to read
    """

    __slots__ = ("_owner", "_view")

    def __init__(self, owner: Any, view: Callable[[Any], Any] = vars) -> None:
        self._view = view
        try:
            self._owner: Callable[[], Any] = ref(owner)
        except TypeError:
            self._owner = lambda: owner

    @property
    def are_gone(self) -> bool:
        """True if the owner is gone."""
        return self._owner() is None

    def view(self) -> Mapping[str, Any]:
        """Return the entries."""
        owner = self._owner()
        return {} if owner is None else self._view(owner)

    def __getitem__(self, name: str) -> Any:
        return self.view()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        view: Any = self.view()
        view[name] = value

    def __delitem__(self, name: str) -> None:
        view: Any = self.view()
        del view[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.view())

    def __len__(self) -> int:
        return len(self.view())


class ClassEntries(ReachedEntries):
    """The attributes of a class."""

    def __setitem__(self, name: str, value: Any) -> None:
        if (kind := self._owner()) is not None:
            setattr(kind, name, value)

    def __delitem__(self, name: str) -> None:
        if name in self.view():
            delattr(self._owner(), name)


class CellEntries(ReachedEntries):
    """The variables of enclosing functions that a function reads."""

    def __init__(self, function: FunctionType) -> None:
        super().__init__(function, _variables)

    def __setitem__(self, name: str, value: Any) -> None:
        if (function := self._owner()) is not None:
            _cells(function)[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        if name in self.view():
            del _cells(self._owner())[name].cell_contents


def _cells(function: FunctionType) -> dict[str, CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _variables(function: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in _cells(function).items():
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found
