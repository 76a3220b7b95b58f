"""Values of attributes: which of them can wait for a second run, and stand-ins for those that cannot."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from operator import eq, ge, is_
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from actstore.errors import StateError
from actstore.model.tree import ABSENT, CONTAINERS, FUNCTIONS, OF_MODULES, has_variables, is_constant, is_flat

_OPERATORS = (
    "bool call contains delitem eq format float ge getitem gt index int iter le len lt ne neg next reversed setitem "
    "add and floordiv matmul mod mul or pow sub truediv xor radd rfloordiv rmatmul rmul rpow rsub rtruediv "
    "iadd imul isub"
)
_FILLED = CONTAINERS - {set}  # what has values by key or number
HIDDEN = object()  # for a value that cannot wait
MAX_WAITING_LENGTH = 64  # of a container
MAX_WAITING_NBYTES = 2**20  # of a tensor that forward replaces: a larger one would cost what recomputing saves


class HiddenAttribute:
    """A stand-in for a value that is not there in a second run. Whatever uses it raises StateError with `text`."""

    def __init__(self, text: str) -> None:
        self.__dict__["_text"] = text

    def __getattr__(self, name: str) -> NoReturn:
        raise StateError(self.__dict__["_text"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> NoReturn:
        raise StateError(next(arg.__dict__["_text"] for arg in tree_leaves((args, kwargs)) if isinstance(arg, cls)))


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


def hidden_by_region(part: str) -> HiddenAttribute:
    """Return the stand-in for an output of an excepted part that the region did not read in its first run."""
    return HiddenAttribute(
        f"part={part}: the second run of the region around it reads an output that the first run did not read. Give "
        "what has changed since to the module as an argument, or leave the part's rule out."
    )


def hidden_by_forward(name: str) -> HiddenAttribute:
    """Return the stand-in for an earlier value that could not wait for the second run."""
    return HiddenAttribute(
        f"attribute={name}: a recomputed module must not read what an earlier call has left there, because its "
        "forward has replaced it since. Only plain values, and tensors of at most 1 MiB without a graph, wait for the "
        "second run. Give it to the module as an argument, or as a buffer, or write keep in place of recompute."
    )


def hidden_by_code(name: str) -> HiddenAttribute:
    """Return the stand-in for a value that other code has replaced or changed since forward."""
    return HiddenAttribute(
        f"attribute={name}: other code changed it between forward and backward, and a recomputed module must read "
        "what forward has read. Only plain values, and tensors of at most 1 MiB without a graph, wait for the second "
        "run. Change it after backward, or write keep in place of recompute."
    )


def hidden_by_write(name: str) -> HiddenAttribute:
    """Return the stand-in for a buffer, or a tensor in an attribute, that other code has written to since forward."""
    return HiddenAttribute(
        f"tensor={name}: other code wrote to it in place between forward and backward, and a recomputed module must "
        "read what forward has read. Set the attribute to a new tensor, write after backward, or write keep in place "
        "of recompute."
    )


def names_of(before: dict[str, Any], entries: dict[str, Any]) -> Iterator[str]:
    return (name for name in {**before, **entries} if name not in OF_MODULES)


def is_sharded(value: Any) -> bool:
    """Return whether a value is a part of a flat parameter: FSDP1 puts these into attributes as it gathers weights."""
    return isinstance(value, Tensor) and is_flat(value)


def can_wait(value: Any) -> bool:
    """Return whether a value can wait for the second run: much memory must not wait with it."""
    if value is ABSENT or is_constant(value):
        return True
    if isinstance(value, FUNCTIONS):
        return not has_variables(value)
    if type(value) is partial:  # of a checkpoint function, as Transformers sets it
        return all(map(can_wait, (value.func, *value.args, *value.keywords.values())))
    if type(value) in CONTAINERS:
        return all(map(can_wait, value.values() if isinstance(value, dict) else value))
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_inference():
        return False
    return value.grad_fn is None and value.untyped_storage().nbytes() <= MAX_WAITING_NBYTES


def waiting_value(name: str, value: Any) -> Any:
    """Return what waits for the second run: the value, or a stand-in where it cannot."""
    return value if can_wait(value) else hidden_by_forward(name)


def waiting(name: str, content: Any, hidden: Callable[[str], Any] = hidden_by_forward) -> Any:
    """Return a container for the second run, in place: each value in it that cannot wait is a stand-in."""
    items = [*content.items()] if isinstance(content, dict) else [*enumerate(content)]
    for key, value in () if isinstance(content, set) else items:
        inner = f"{name}[{key!r}]"
        if not can_wait(value):
            content[key] = waiting(inner, value, hidden) if type(value) in _FILLED else hidden(inner)
    return content


def containers_of(entries: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the names of containers among attributes, each with the container and a copy."""
    return [
        (name, value, copy_of(value))
        for name, value in entries.items()
        if name not in OF_MODULES and type(value) in CONTAINERS
    ]


def copy_of(value: Any) -> Any:
    """Return a copy of a container, and of the containers in it."""
    twin = copy(value)
    if isinstance(value, dict):
        inner = [(key, part) for key, part in value.items() if type(part) in CONTAINERS]
    elif isinstance(value, list | deque):
        inner = [(i, part) for i, part in enumerate(value) if type(part) in CONTAINERS]
    else:
        inner = []
    for key, part in inner:
        twin[key] = copy_of(part)
    return twin


def has_same_content(value: Any, was: Any) -> bool:
    """Return whether a container holds the same objects as its copy, in the same order if it has one."""
    if isinstance(value, set):
        return bool(value == was)
    if len(value) != len(was):
        return False
    if isinstance(value, dict):
        return all(map(is_, value, was)) and all(map(is_same_value, value.values(), was.values()))
    return all(map(is_same_value, value, was))


def is_same_value(value: Any, was: Any) -> bool:
    """Return whether a value is what was there, or a container with the content of `was`, its copy."""
    return value is was or (type(value) in CONTAINERS and type(value) is type(was) and has_same_content(value, was))


def fill(value: Any, content: Any) -> None:
    """Give a container other content."""
    value.clear()
    (value.extend if isinstance(value, list | deque) else value.update)(content)


def put(entries: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute, or delete it where it is to be absent."""
    if value is ABSENT:
        entries.pop(name, None)
    else:
        entries[name] = value


def recognizer(value: Any, *, inside: bool = False) -> Callable[[Any], bool]:
    """Return what tells whether an object is `value`, and keeps no graph alive that a tensor in it may be part of.

    An object that has died is never taken for a later one at its address: it is known by a weak reference. Lists,
    dicts and tuples take none. They are known by their parts, too: other parts, another object. Those inside of
    them may get longer.
    """
    with suppress(TypeError):
        reference = ref(value)
        return lambda now: now is reference()
    if not isinstance(value, list | dict | tuple):
        return partial(is_, value)
    address, fits = id(value), ge if inside else eq
    parts = [recognizer(part, inside=True) for part in parts_of(value)]
    return lambda now: (
        id(now) == address
        and isinstance(now, list | dict | tuple)
        and fits(len(found := parts_of(now)), len(parts))
        and all(is_same(part) for is_same, part in zip(parts, found, strict=False))
    )


def keeper(name: str, value: Any) -> Callable[[Any], Any]:
    """Return the function from the value now to that of the second run."""
    if is_constant(value):
        return lambda _: value
    if can_wait(value):
        if isinstance(value, Tensor):
            version = value._version
            return lambda _: value if value._version == version else hidden_by_code(name)
        was = copy_of(value) if type(value) in CONTAINERS else value
        return lambda _: copy_of(was) if type(was) in CONTAINERS else was
    with suppress(TypeError):
        weak = ref(value)
        return lambda _: hidden_by_code(name) if (found := weak()) is None else found
    is_same = recognizer(value)
    if type(value) in _FILLED and len(value) <= MAX_WAITING_LENGTH:
        content = waiting(name, copy_of(value), hidden_by_code)
        return lambda now: now if is_same(now) else copy_of(content)
    return lambda now: now if is_same(now) else hidden_by_code(name)


def long_recognizer(value: Any) -> Callable[[Any], bool]:
    """Return what tells whether an object is a container with the parts that it has now, and keeps no copy of these."""
    known = hash(tuple(map(id, parts_of(value))))
    return lambda now: now is value and hash(tuple(map(id, parts_of(now)))) == known


def parts_of(value: Any) -> list[Any]:
    """Return what a container holds, the keys of a dict among it."""
    return [part for item in value.items() for part in item] if isinstance(value, dict) else [*value]


@contextmanager
def placed(
    befores: Sequence[tuple[Any, str, Any]], earlier: Sequence[tuple[dict[str, Any], str, Any]]
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
            remove_hooks(value, since)
            fill(value, content)
        for entries, name, now in values:
            remove_hooks(entries.get(name), since)
            put(entries, name, now)
        for entries, names in orders:
            if isinstance(entries, dict) and [*entries] != names:
                entries |= {name: entries.pop(name) for name in names if name in entries}


def remove_hooks(value: Any, since: int) -> None:
    """Remove each hook whose handle is about to be dropped, if it is not older than the handle with number `since`."""
    if type(value) in CONTAINERS:
        for part in value.values() if isinstance(value, dict) else value:
            remove_hooks(part, since)
    elif isinstance(value, RemovableHandle):
        parts = getattr(value, "handles", (value,))  # a hook on several tensors has some
        if all(part.id >= since for part in parts):
            value.remove()
