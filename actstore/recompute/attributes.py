"""Attributes of modules beside weights and buffers, and what forwards leave in them.

A region that has given an attribute another value in its first run finds the earlier value in its second run, and what
the first run has left is there again afterwards. So what a module counts, it counts once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from enum import Enum
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from actstore.errors import StateError
from actstore.model.names import is_of_torch
from actstore.model.weights import is_flat

CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
_OF_MODULES = frozenset(vars(Module())) | {"forward"}  # attributes of PyTorch's own, and the wrapper of a store
_ABSENT = object()
_NOTHING = nullcontext()
_OPERATORS = (
    "bool call contains delitem eq format float ge getitem gt index int iter le len lt ne neg next reversed setitem "
    "add and floordiv matmul mod mul or pow sub truediv xor radd rfloordiv rmatmul rmul rpow rsub rtruediv "
    "iadd imul isub"
)
MAX_WAITING_NBYTES = 2**20  # of a tensor that forward replaces: a larger one would cost what recomputing saves


class HiddenAttribute:
    """A stand-in for a value that is not there in a second run. Whatever uses it raises StateError with `text`."""

    def __init__(self, text: str) -> None:
        self.__dict__["_text"] = text

    def __getattr__(self, name: str) -> NoReturn:
        raise StateError(self.__dict__["_text"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> NoReturn:
        found = next((arg for arg in args if isinstance(arg, HiddenAttribute)), None)
        raise StateError("a hidden attribute" if found is None else found.__dict__["_text"])


def _refuse(self: HiddenAttribute, *_: Any, **__: Any) -> NoReturn:
    raise StateError(self.__dict__["_text"])


for _name in _OPERATORS.split():
    setattr(HiddenAttribute, f"__{_name}__", _refuse)


def hidden_by_part(module: Module, name: str) -> HiddenAttribute:
    """Return the stand-in for what an excepted part has put into an attribute."""
    return HiddenAttribute(
        f"attribute={type(module).__name__}.{name}: a recomputed region must not read what a part excepted from it "
        "has put there, because that part does not run again. Return the tensor from the part, or leave its rule out."
    )


def _hidden_by_forward(name: str) -> HiddenAttribute:
    """Return the stand-in for an earlier value that could not wait for the second run."""
    return HiddenAttribute(
        f"attribute={name}: a recomputed module must not read what an earlier call has left there, because its "
        "forward has replaced it since. Only plain values, and tensors of at most 1 MiB without a graph, wait for the "
        "second run. Give it to the module as an argument, or as a buffer, or write keep in place of recompute."
    )


def is_constant(value: Any) -> bool:
    """Return whether a value is plain: nothing can change it, and it holds no tensor."""
    return isinstance(value, CONSTANTS) or (isinstance(value, tuple) and all(map(is_constant, value)))


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

    Notes
    -----
    Not thread-safe: modules that change attributes must not run or be recomputed beside another thread.
    """

    __slots__ = ("_before", "_changes", "_contents")

    def __init__(self, modules: Iterable[Module]) -> None:
        before: list[tuple[Module, dict[str, Any], list[tuple[str, Any, Any]]]] = []
        for module in modules:
            kind: Any = type(module)
            if not is_of_torch(kind):
                entries = vars(module).copy()
                before.append((module, entries, _containers(entries)))
        self._before: Sequence[tuple[Module, dict[str, Any], list[tuple[str, Any, Any]]]] = before
        self._changes: Sequence[AttributeChange] = ()
        self._contents: Sequence[tuple[dict[str, Any], str, Any]] = ()  # no containers: these may hold the output

    def ended(self) -> None:
        """Mark the end of the forward, and drop what it has not changed."""
        contents: dict[int, tuple[dict[str, Any], str, Any]] = {}
        changes: list[AttributeChange] = []
        for module, before, containers in self._before:
            changes += _changes(module, before)
            for name, value, was in containers:
                if not _same_content(value, was):
                    contents[id(value)] = vars(module), name, _waiting(f"{type(module).__name__}.{name}", was)
        self._changes, self._contents, self._before = tuple(changes), tuple(contents.values()), ()

    def rewound(self) -> AbstractContextManager[None]:
        """Return a context in which the attributes have their values from before the forward.

        A saved tensor that is read before the forward has ended runs it again in between.
        """
        if self._before:
            return self._paused()
        return self._rewound() if self._changes or self._contents else _NOTHING

    @contextmanager
    def _paused(self) -> Iterator[None]:
        now = [(module, entries := vars(module).copy(), _containers(entries)) for module, _, _ in self._before]
        since = RemovableHandle.next_id
        try:
            _restore(self._before)
            yield
        finally:
            for module, _, _ in now:
                _remove_hooks(vars(module), since)
            _restore(now)

    @contextmanager
    def _rewound(self) -> Iterator[None]:
        values = [(entries, name, entries.get(name, _ABSENT)) for entries, name, _, _ in self._changes]
        contents: list[tuple[Any, Any]] = []
        since = RemovableHandle.next_id
        try:
            for entries, name, was, version in self._changes:
                is_other = isinstance(was, Tensor) and was._version != version
                _put(entries, name, _hidden_by_forward(name) if is_other else was)
            for entries, name, was in self._contents:
                value = entries.get(name, _ABSENT)
                if type(value) is type(was):
                    contents.append((value, copy(value)))
                    _fill(value, was)
                else:  # the user has put another object there
                    values.append((entries, name, value))
                    _put(entries, name, copy(was))
            yield
        finally:
            for value, content in reversed(contents):
                _remove_hooks(value, since)
                _fill(value, content)
            for entries, name, now in values:
                _remove_hooks(entries.get(name), since)
                _put(entries, name, now)


class Effects(NamedTuple):
    """Record of what an excepted part has left in attributes of its modules.

    Attributes
    ----------
    hidden : attributes that hold tensors and other objects since then, or a container that it has changed
    plain : attributes with other plain values since then; `_ABSENT` for one that it has deleted
    """

    hidden: list[tuple[Module, str]]
    plain: list[tuple[Module, str, Any]]

    def repeat(self) -> None:
        """Give the attributes their plain values."""
        for module, name, value in self.plain:
            _put(vars(module), name, value)


class PartAttributes:
    """The attributes of an excepted part's modules before it runs."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._before = [(module, entries := vars(module).copy(), _containers(entries)) for module in modules]

    def effects(self) -> Effects:
        """Return what the part has changed."""
        found = Effects([], [])
        for module, before, containers in self._before:
            entries = vars(module)
            changed = {id(value) for _, value, was in containers if not _same_content(value, was)}
            for name in _names_of(before, entries):
                value = entries.get(name, _ABSENT)
                if value is not before.get(name, _ABSENT):
                    if value is _ABSENT or is_constant(value):
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
                before.append((module, name, vars(module).get(name, _ABSENT)))
            for module, name in found.hidden:
                vars(module)[name] = hidden_by_part(module, name)
        yield
    finally:
        for module, name, value in reversed(before):
            _put(vars(module), name, value)


def _changes(module: Module, before: dict[str, Any]) -> Iterator[AttributeChange]:
    """Yield the attributes of a module that are other objects than before."""
    entries = vars(module)
    if len(before) == len(entries) and all(map(is_, before.values(), entries.values())) and [*before] == [*entries]:
        return
    for name in _names_of(before, entries):
        was, now = before.get(name, _ABSENT), entries.get(name, _ABSENT)
        if was is now or _is_sharded(was) or _is_sharded(now):
            continue
        was = _waiting_value(f"{type(module).__name__}.{name}", was)
        yield AttributeChange(entries, name, was, was._version if isinstance(was, Tensor) else 0)


def _names_of(before: dict[str, Any], entries: dict[str, Any]) -> Iterator[str]:
    return (name for name in {**before, **entries} if name not in _OF_MODULES)


def _is_sharded(value: Any) -> bool:
    """Return whether a value is a part of a flat parameter: FSDP1 puts these into attributes as it gathers weights."""
    return isinstance(value, Tensor) and is_flat(value)


def _waiting_value(name: str, value: Any) -> Any:
    """Return what can wait for the second run: the value, or a stand-in where much memory would wait with it."""
    if value is _ABSENT or is_constant(value) or isinstance(value, _FUNCTIONS):
        return value
    if type(value) in _CONTAINERS:
        parts = value.values() if isinstance(value, dict) else value
        return value if all(_waiting_value(name, part) is part for part in parts) else _hidden_by_forward(name)
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_inference():
        return _hidden_by_forward(name)
    small = value.grad_fn is None and value.untyped_storage().nbytes() <= MAX_WAITING_NBYTES
    return value if small else _hidden_by_forward(name)


def _waiting(name: str, content: Any) -> Any:
    """Return a container for the second run, in place: each value that cannot wait is a stand-in."""
    if isinstance(content, dict):
        for key, value in content.items():
            content[key] = _waiting_value(f"{name}[{key!r}]", value)
    elif isinstance(content, list | deque):
        for i, value in enumerate(content):
            content[i] = _waiting_value(f"{name}[{i}]", value)
    return content


def _containers(entries: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the names of containers among attributes, each with the container and a copy."""
    return [
        (name, value, copy(value))
        for name, value in entries.items()
        if name not in _OF_MODULES and type(value) in _CONTAINERS
    ]


def _same_content(value: Any, was: Any) -> bool:
    """Return whether a container holds the same objects as its copy, in the same order if it has one."""
    if isinstance(value, set):
        return bool(value == was)
    if len(value) != len(was) or not all(map(is_, value, was)):
        return False
    return not isinstance(value, dict) or all(map(is_, value.values(), was.values()))


def _fill(value: Any, content: Any) -> None:
    """Give a container other content."""
    value.clear()
    (value.extend if isinstance(value, list | deque) else value.update)(content)


def _restore(states: Iterable[tuple[Module, dict[str, Any], list[tuple[str, Any, Any]]]]) -> None:
    """Give modules back the attributes that they had, and containers their content."""
    for module, were, containers in states:
        entries = vars(module)
        for name in list(_names_of(were, entries)):
            was, now = were.get(name, _ABSENT), entries.get(name, _ABSENT)
            if not (was is now or _is_sharded(was) or _is_sharded(now)):
                _put(entries, name, was)
        for _, value, content in containers:
            if not _same_content(value, content):
                _fill(value, content)


def _remove_hooks(value: Any, since: int) -> None:
    """Remove each hook whose handle is about to be dropped, if it is not older than the handle with number `since`."""
    if type(value) in _CONTAINERS:
        for part in value.values() if isinstance(value, dict) else value:
            _remove_hooks(part, since)
    elif isinstance(value, RemovableHandle):
        parts = getattr(value, "handles", (value,))  # a hook on several tensors has some
        if all(part.id >= since for part in parts):
            value.remove()


def _put(entries: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute, or delete it where it is to be absent."""
    if value is _ABSENT:
        entries.pop(name, None)
    else:
        entries[name] = value
