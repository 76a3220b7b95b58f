"""The blocks that a model repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from torch.jit import ScriptModule
from torch.nn import Module, ModuleList, Sequential
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from actstore.model.names import named_modules


def repeated_blocks(model: Module, *, callable_only: bool = True) -> list[str]:
    """Return the names of the modules that a model repeats: the children of its outermost ModuleLists and Sequentials.

    A list of parts, such as an embedding, an encoder and a head, repeats what the lists inside of it repeat. Where the
    model has no list, they are its direct children. Modules without parameters are left out. Where `callable_only`,
    children stand in place of a module that has no forward, such as a list in a list.
    """
    names = {module: name for name, module in named_modules(model)}
    blocks = [block for outermost in _outermost_lists(model) for block in _blocks_of(outermost)]
    blocks = blocks or [*model.children()]
    if callable_only:
        blocks = list(dict.fromkeys(part for block in blocks for part in _callable_parts(block)))
    return [names[block] for block in blocks if _has_parameters(block)]


def has_forward(module: Module) -> bool:
    """Return whether a module can be called."""
    return isinstance(module, ScriptModule) or type(module).forward is not Module.forward


def _callable_parts(module: Module) -> Iterator[Module]:
    if has_forward(module):
        yield module
    else:
        for child in module.children():
            yield from _callable_parts(child)


def _outermost_lists(module: Module) -> Iterator[Module]:
    if _is_list(module):
        yield module
    else:
        for child in module.children():
            yield from _outermost_lists(child)


def _blocks_of(outermost: Module) -> list[Module]:
    """Return the children of a list; for a list of parts, the outermost modules that lists inside of it repeat."""
    children, lists = list(outermost.children()), set(_lists_in(outermost))
    counts = Counter(_kind(child) for each in lists for child in _with_parts(each))
    repeated = {kind for kind, count in counts.items() if count > 1}
    found = list(_outermost_of(outermost, lists, repeated))
    return children if set(found) <= set(children) else found


def _lists_in(module: Module) -> Iterator[Module]:
    """Yield a list and plain lists in it; of a Sequential of parts also the lists in these that hold one class each."""
    yield module
    parts = _with_parts(module)
    single = sum(map(_has_parameters, module.children())) == 1
    whole = isinstance(module, ModuleList) or single or len(set(map(_kind, parts))) < len(parts)
    for part in parts:
        if _is_plain(part):
            yield from _lists_in(part)
        elif not whole:
            for inner in _outermost_lists(part):
                if len({_kind(child) for child in _with_parts(inner)}) == 1:
                    yield inner


def _outermost_of(module: Module, lists: set[Module], kinds: set[Hashable]) -> Iterator[Module]:
    for child in module.children():
        if module in lists and _kind(child) in kinds:
            yield child
        else:
            yield from _outermost_of(child, lists, kinds)


def _kind(module: Module) -> Hashable:
    """Return a module's class; for a plain list the shapes of its parameters, too, as its class says nothing."""
    weights: Iterable[Any] = module.parameters()
    shapes = (None if is_lazy(each) else each.shape for each in weights)
    return type(module), tuple(shapes) if _is_plain(module) else ()


def _is_plain(module: Module) -> bool:
    return type(module) in (ModuleList, Sequential)


def _is_list(module: Module) -> bool:
    return isinstance(module, ModuleList | Sequential) and not isinstance(module, ParametrizationList)


def _with_parts(module: Module) -> list[Module]:
    """Return the children that have parameters, and children of their own."""
    return [child for child in module.children() if _has_parameters(child) and next(child.children(), None) is not None]


def _has_parameters(module: Module) -> bool:
    return next(module.parameters(), None) is not None
