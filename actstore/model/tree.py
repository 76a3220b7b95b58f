"""The modules of a recomputed region, and the entries of each: one walk, from which all snapshots take their parts."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable
from enum import Enum
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter, RNNBase

from actstore.model.generators import has_state
from actstore.model.names import is_of_torch, named_modules

CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size,
)  # fmt: skip
FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
OF_MODULES = frozenset(vars(Module())) | {"forward"}  # attributes of PyTorch's own, and the wrapper of a store
ABSENT = object()
Entries = dict[str, Any]  # attributes, parameters, buffers or modules of one module, by name
version_of = attrgetter("_version")
requires_grad_of = attrgetter("requires_grad")
_REGISTRIES = attrgetter("_parameters", "_buffers", "_modules")
_HOOKS = attrgetter("_forward_pre_hooks", "_forward_hooks")


class ModuleEntries(NamedTuple):
    """The entries of one module.

    Attributes
    ----------
    attributes : all of the module's; `plain` has the values of those that can wait for a second run
    is_of_torch : whether the module is PyTorch's own, which has buffers for what it changes
    runs_again : whether its forward runs again with the region
    names : of the attributes
    registries : its parameters, buffers and modules, each with a copy
    """

    module: Module
    attributes: Entries
    plain: Entries
    is_of_torch: bool
    runs_again: bool
    names: frozenset[str]
    registries: tuple[tuple[Entries, Entries], ...]


class AttributeFound(NamedTuple):
    """An attribute of a user's module that is not plain: a tensor, a container, an object."""

    entries: Entries
    owner: str  # name of the module's class
    name: str
    value: Any
    runs_again: bool


class ModuleTree:
    """All modules of a region, and their entries, before a forward. Calls that find the same share one tree.

    Parameters
    ----------
    root : the module of the region
    once : modules in it whose forward does not run again with that of `root`

    Attributes
    ----------
    modules : `root` and all modules inside of it, `root` first; `classes` are theirs
    entries : those of each module
    kinds : classes of the modules that are not PyTorch's own
    hooked : modules with hooks of their forward; `unhooked` are the empty dicts of hooks
    registries : those of the modules that run again
    of_users : attributes of the modules that are not PyTorch's own
    stateful : modules with buffers or hooks, and those that do not run again
    recurrent : modules that may draw by cuDNN
    limited : embeddings that limit the norms of their rows, with the limit
    generators : of random numbers, in attributes
    parameters : those whose versions tell changes; `leaves` are those of them that have no history
    may_last : whether no tensor has a history, which the tree would hold
    """

    def __init__(self, root: Module, once: Container[Module] = ()) -> None:
        self.root = root
        self.modules = [module for _, module in named_modules(root)]
        self.classes = [*map(type, self.modules)]
        self.entries: list[ModuleEntries] = []
        self.kinds: dict[Any, None] = {}
        self.stateful: list[tuple[Module, bool]] = []  # whether it runs again
        self.recurrent = [module for module in self.modules if isinstance(module, RNNBase)]
        embeddings = [each for each in self.modules if isinstance(each, Embedding | EmbeddingBag)]
        self.limited = [(each, each.max_norm) for each in embeddings if each.max_norm is not None]
        self._loose: list[tuple[Entries, str, str, bool]] = []
        for module in self.modules:
            self._visit(module, runs_again=module not in once)
        self._with_parameters = [each.registries[0][0] for each in self.entries if each.registries[0][0]]
        self._weights = [*chain.from_iterable(map(dict.values, self._with_parameters))]
        self.parameters = [each for each in self._weights if has_version(each)]
        self.leaves = [each for each in self.parameters if each.is_leaf]
        self.generators = [each for found in self.entries for each in found.plain.values() if _is_generator(each)]
        self._attributes = [each.attributes for each in self.entries]
        self._getters = [itemgetter("_parameters", "_modules", *each.plain) for each in self.entries]
        registries = [*chain.from_iterable(_REGISTRIES(module) for module in self.modules)]
        self._registries = registries
        self._filled = [*filter(None, registries)]
        self.unhooked = [hooks for module in self.modules for hooks in _HOOKS(module) if not hooks]
        self.hooked = [module for module in self.modules if any(_HOOKS(module))]
        self.registries = [pair for each in self.entries if each.runs_again for pair in each.registries]
        self.of_users = [each.attributes for each in self.entries if not each.is_of_torch]
        self._sizes = self._sizes_now()
        self._readers = self.readers()
        self._values = [*chain.from_iterable(map(call, self._readers))]
        tensors = [*self._weights, *chain.from_iterable(module._buffers.values() for module in self.modules)]
        self.may_last = all(each is None or each.grad_fn is None for each in tensors)  # else it would hold a graph

    @classmethod
    def now(cls, root: Module, once: Container[Module], last: ModuleTree | None) -> ModuleTree:
        """Return the tree now: `last`, of an earlier call, where it is the same."""
        if last is not None and last.may_last and not any(last.unhooked) and last.is_current():
            return last
        return cls(root, once)

    def is_current(self) -> bool:
        """Return whether all parameters, buffers, modules, classes and plain attributes are the same now."""
        try:
            values = chain.from_iterable(map(call, self._readers))
            return all(map(is_, values, self._values)) and self._sizes_now() == self._sizes
        except KeyError:  # an attribute is gone
            return False

    def has_same_parameters(self) -> bool:
        """Return whether the parameters are the same objects now."""
        return all(map(is_, chain.from_iterable(map(dict.values, self._with_parameters)), self._weights))

    def is_steady(self) -> bool:
        """Return whether its modules have nothing but parameters, modules and plain attributes."""
        return self.may_last and not (self._loose or self.stateful or self.hooked or self.limited)

    def dicts(self) -> list[Entries]:
        """Return the attributes, parameters, buffers and modules of all modules."""
        return [*self._attributes, *self._registries]

    def readers(self) -> list[Callable[[], Iterable[Any]]]:
        """Return functions that read plain attributes, parameters, buffers and modules. They fail where one is gone."""
        attributes = [partial(getter, each) for getter, each in zip(self._getters, self._attributes, strict=True)]
        return [*attributes, *[partial(dict.values, each) for each in self._filled]]

    def loose(self) -> list[AttributeFound]:
        """Return the attributes now of users' modules that were not plain."""
        return [
            AttributeFound(entries, owner, name, entries.get(name, ABSENT), runs_again)
            for entries, owner, name, runs_again in self._loose
        ]

    def _visit(self, module: Module, *, runs_again: bool) -> None:
        kind: Any = type(module)
        of_torch, attributes = is_of_torch(kind), vars(module)
        plain = {"training": module.training} if "training" in attributes else {}  # a compiled module has it elsewhere
        loose = []
        for name, value in attributes.items():
            if name not in OF_MODULES:
                if is_constant(value) or _is_generator(value) or (not of_torch and is_plain_function(value)):
                    plain[name] = value
                elif not of_torch:
                    loose.append((attributes, kind.__name__, name, runs_again))
        registries = tuple([(each, dict(each)) for each in _REGISTRIES(module)])
        names = frozenset(attributes)
        self.entries.append(ModuleEntries(module, attributes, plain, of_torch, runs_again, names, registries))
        self._loose += loose
        if not of_torch:
            self.kinds[kind] = None
        if module._buffers or module._forward_pre_hooks or not runs_again:
            self.stateful.append((module, runs_again))

    def _sizes_now(self) -> list[Any]:
        wrapped = [len(each) - ("forward" in each) for each in self.of_users]  # stores come and go
        return [*wrapped, *map(len, self._registries), *map(type, self.modules)]


def _is_generator(value: Any) -> bool:
    kind: Any = type(value)
    return has_state(kind)


def is_constant(value: Any) -> bool:
    """Return whether a value is plain: nothing can change it, and it holds no tensor."""
    return isinstance(value, CONSTANTS) or (isinstance(value, tuple) and all(map(is_constant, value)))


def is_plain_function(value: Any) -> bool:
    """Return whether a value is a function or a class, and holds no variables that may lead to a graph."""
    return isinstance(value, FUNCTIONS) and not has_variables(value)


def has_variables(function: Any) -> bool:
    """Return whether a function reads variables of enclosing functions, which may hold a graph. PyTorch's hold none."""
    if not isinstance(function, FunctionType) or function.__module__.partition(".")[0] == "torch":
        return False
    return function.__code__.co_freevars not in ((), ("__class__",))


def has_version(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a version counter shows changes of a tensor, and sharding code does not change it."""
    if tensor is None or tensor.is_inference():
        return False
    kind = tensor.__class__
    return kind is Parameter or (kind is Tensor and not is_flat(tensor))


def is_flat(tensor: Tensor) -> bool:
    """Return whether FSDP1 has gathered a weight: it is then part of one flat parameter."""
    return bool(getattr(tensor._base, "_is_flat_param", False))


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the versions of tensors."""
    return [*map(version_of, tensors)]
