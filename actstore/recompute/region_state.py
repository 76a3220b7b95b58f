"""The state that a region finds again when it runs again, beside its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from itertools import chain, repeat
from operator import call, is_, itemgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.utils.hooks import RemovableHandle

from actstore.errors import StateError
from actstore.model.generators import GeneratorStates
from actstore.model.snapshot import AS_IT_IS
from actstore.model.torch_settings import TorchSettings, UserModes
from actstore.model.tree import ABSENT, ModuleTree, is_constant, requires_grad_of, version_of, versions_of
from actstore.model.weights import CachedWeights, Weights
from actstore.model.writes import WriteHistory
from actstore.recompute.attribute_values import (
    MAX_WAITING_LENGTH,
    copy_of,
    hidden_by_write,
    is_same_value,
    keeper,
    parts_of,
)
from actstore.recompute.attributes import AttributeStates
from actstore.recompute.forwards import own_forward
from actstore.recompute.module_code import ModuleCode
from actstore.recompute.reached import ReachedState

_T = TypeVar("_T")
_STATELESS = {torch.device("cpu"), torch.device("meta")}  # or devices with a generator that is always known

_FORWARD = methodcaller("get", "forward")


class ThreadState:
    """The state of the last call of a region on this thread, with which the next one shares what is the same."""

    def __init__(self) -> None:
        self.generators: GeneratorStates | None = None
        self.settings: TorchSettings | None = None
        self.context: ContextValues | None = None

    def close(self) -> None:
        """Drop what the last call need not keep, as no other one follows."""
        if self.generators is not None:
            self.generators.drop_unchanged()


class SteadyState:
    """Snapshots of a call whose modules have nothing but parameters and plain attributes, and whose forward left these.

    Later calls share them, for as long as all is the same. To tell that takes few calls of Python, because each region
    does it three times.
    """

    __slots__ = (
        "_dicts", "_forwards", "_leaves", "_modules", "_parameters", "_readers", "_sizes", "_trained", "_values",
        "_versions", "attributes", "code", "context", "reached", "tree", "weights",
    )  # fmt: skip

    def __init__(
        self,
        tree: ModuleTree,
        context: ContextValues,
        attributes: AttributeStates,
        reached: ReachedState,
        code: ModuleCode,
        weights: Weights,
    ) -> None:
        self.tree = tree
        self.context = context
        self.attributes = attributes
        self.reached = reached
        self.code = code
        self.weights = weights
        self._parameters, self._leaves = tree.parameters, tree.leaves
        self._versions, self._trained = versions_of(tree.parameters), [*map(requires_grad_of, tree.leaves)]
        views = reached.plain()
        self._dicts = [*tree.dicts(), *[view for view, _ in views]]
        self._readers: list[Callable[[], Iterable[Any]]] = tree.readers()
        self._readers += [partial(itemgetter(*names, names[0]), view) for view, names in views if names]
        self._values = [*chain.from_iterable(map(call, self._readers))]
        self._modules = [each.attributes for each in tree.entries]
        self._forwards = [*map(own_forward, self._modules)]
        self._sizes: list[list[Any]] = []  # with the wrappers of a store, and without them

    def is_same(self) -> bool:
        """Return whether all is as it was before the call."""
        if self._versions != [*map(version_of, self._parameters)]:
            return False
        if self._trained != [*map(requires_grad_of, self._leaves)]:
            return False
        if self.has_same_attributes():
            return True
        if any(self.tree.unhooked) or not (self.tree.is_current() and self.reached.is_same()):
            return False
        if not all(map(is_, map(own_forward, self._modules), self._forwards)):
            return False
        self._sizes = [self._sizes_now(), *self._sizes[:3]]
        return True

    def rewound(self) -> AbstractContextManager[None]:
        """Return a context for a second run when all is the same: it leaves attributes so."""
        return SteadyRun(self) if self.tree.of_users else AS_IT_IS

    def has_same_attributes(self) -> bool:
        """Return whether attributes, parameters, modules and their code are the same, as calls before have seen."""
        try:
            if not all(map(is_, chain.from_iterable(map(call, self._readers)), self._values)):
                return False
        except KeyError:  # an attribute is gone
            return False
        return not any(self.tree.unhooked) and self._sizes_now() in self._sizes

    def _sizes_now(self) -> list[Any]:
        return [*map(len, self._dicts), *map(_FORWARD, self._modules), *map(type, self.tree.modules)]


class SteadyRun:
    """Context of a second run of modules that are the same as before the first one: their attributes stay so."""

    __slots__ = ("_since", "_steady")

    def __init__(self, steady: SteadyState) -> None:
        self._steady = steady

    def __enter__(self) -> None:
        self._since = RemovableHandle.next_id

    def __exit__(self, *_: object) -> None:
        if not self._steady.has_same_attributes():
            self._steady.attributes.undo(self._since)


class RegionState:
    """Snapshots from before the first run of a region, which take their parts from one walk over its modules.

    Parameters
    ----------
    leaves : the arguments of the call, flat
    last : of the last call on this thread
    writes : what earlier calls of the region have written to
    steady : of an earlier call of the region, if its state is the same

    Attributes
    ----------
    steady : what later calls may share, when the first run has ended; None for nothing
    """

    __slots__ = (
        "_cached", "_context", "_has_ended", "_has_failed", "_modes", "_of_modules", "_settings", "_tree", "generators",
        "steady", "weights",
    )  # fmt: skip

    def __init__(
        self,
        tree: ModuleTree,
        leaves: Sequence[Any],
        last: ThreadState,
        writes: WriteHistory,
        steady: SteadyState | None = None,
    ) -> None:
        self._tree = tree
        last.context = self._context = ContextValues.now(last.context if steady is None else steady.context)
        self._of_modules: tuple[AttributeStates, ReachedState, ModuleCode] | None = None
        found: Sequence[Any] = leaves
        if steady is not None and steady.context is self._context:
            self.steady: SteadyState | None = steady
            self.weights = steady.weights
        else:
            self.steady = None
            loose = tree.loose()
            found = [*leaves, *tree.generators]
            if not _is_gathered(tree):
                self._of_modules = (
                    AttributeStates(tree, loose),
                    (reached := ReachedState(tree, loose)),
                    ModuleCode(tree),
                )
                found += reached.generators
            for each in loose:
                if type(each.value) in (list, dict, tuple):
                    found += each.value.values() if isinstance(each.value, dict) else each.value
            self.weights = Weights(tree, loose, writes, hidden_by_write)
        devices = set()
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device not in _STATELESS:
                devices.add(leaf.device)
        last.generators = self.generators = GeneratorStates(tree.recurrent, devices, last.generators, found)
        last.settings = self._settings = TorchSettings.now(last.settings)
        self._cached = CachedWeights()
        some = _len_torch_function_stack() or _len_torch_dispatch_stack()
        self._modes = UserModes() if some else None
        self._has_ended = self._has_failed = False

    def ended(self) -> None:
        """Mark the end of the first run."""
        self._has_ended = True
        self.generators.ended()
        if self.steady is not None:
            if self.steady.is_same():
                return
            self._part()
        for each in self._of_modules or ():
            each.ended()
        self.weights.ended()
        tree = self._tree
        if self._of_modules is not None and tree.is_steady() and self._context.is_plain and not tree.generators:
            attributes, reached, code = self._of_modules
            if reached.is_steady and self.weights.is_steady and tree.is_current() and not code.has_hooks:
                self.steady = SteadyState(tree, self._context, attributes, reached, code, self.weights)

    def _part(self) -> None:
        """Take snapshots from before the first run that no other call shares, as it changes something."""
        assert self.steady is not None
        self._of_modules = AttributeStates(self._tree), self.steady.reached.before(), self.steady.code
        self.weights, self.steady = self.steady.weights.before(), None

    def failed(self) -> None:
        """Mark the end of the first run by an error, and let go of what attributes had: it may hold the graph."""
        self._of_modules, self._has_failed = None, True

    def rewound(self, around: AbstractContextManager[Any] = AS_IT_IS) -> AbstractContextManager[Any]:
        """Put the state from before the first run back, and return a context at whose end that of now comes back.

        Parameters
        ----------
        around : a context to enter before, and to leave after that

        Raises
        ------
        StateError : the first run ended in an error
        """
        if self._has_failed:
            raise StateError(
                "a tensor that a recomputed module has saved is read, and the forward of the module ended in an error. "
                "Run the forward again, or write keep in place of recompute."
            )
        entered: list[AbstractContextManager[Any]] = []
        try:
            self._enter(entered, around)
        except BaseException:
            RewoundState(entered).__exit__(None, None, None)
            raise
        return RewoundState(entered)

    def _enter(self, entered: list[AbstractContextManager[Any]], around: AbstractContextManager[Any]) -> None:
        """Enter the contexts of all snapshots, and note which have been entered."""
        steady = self.steady
        if around is not AS_IT_IS:
            around.__enter__()
            entered.append(around)
        if steady is not None and steady.is_same():
            of_modules: tuple[Any, ...] = (steady, self._cached)
        else:
            if steady is not None and not self._has_ended:
                self._part()
            shared = () if steady is None else (steady.attributes, steady.reached, steady.code)
            of_modules = (*(self._of_modules or shared), self._cached, self.weights)
        modes = () if self._modes is None else (self._modes,)
        for each in (self._settings, *of_modules, self.generators, *modes):  # modes would see all before
            if (context := each.rewound()) is not AS_IT_IS:
                context.__enter__()
                entered.append(context)
        if (context := _outside_of_vmap()) is not AS_IT_IS:
            context.__enter__()
            entered.append(context)

    def first_run(self, forward: Callable[..., _T]) -> Callable[..., _T]:
        """Return the forward for the first run, which notes what hooks do."""
        code = None if self._of_modules is None else self._of_modules[2]
        return forward if code is None or not code.has_hooks else partial(code.first_run, forward)

    def run(self, function: Callable[[], _T]) -> _T:
        """Run a function with the context variables from before the first run."""
        return self._context.run(function)


class RewoundState:
    """Contexts that have been entered, and are left together."""

    __slots__ = ("_entered",)

    def __init__(self, entered: list[AbstractContextManager[Any]]) -> None:
        self._entered = entered

    def __enter__(self) -> None:
        return

    def __exit__(self, *exc: Any) -> None:
        while self._entered:
            try:
                self._entered.pop().__exit__(*exc)
            except BaseException:
                self.__exit__(*exc)
                raise


def _is_gathered(tree: ModuleTree) -> bool:
    """Return whether DeepSpeed gathers the weights: its hooks count, in attributes, each run of a module."""
    for module in tree.modules:
        for weight in module._parameters.values():
            return hasattr(weight, "ds_id")
    return False


def _outside_of_vmap() -> AbstractContextManager[None]:
    """Leave the vmap of a backward with `is_grads_batched`, which refuses random numbers. No rerun is batched."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return _outside_of_levels(level) if level else AS_IT_IS


@contextmanager
def _outside_of_levels(level: int) -> Iterator[None]:
    for _ in range(level):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(level):
            torch._C._vmapmode_increment_nesting()


class ContextValues:
    """The values of context variables when this object is made, for a forward that runs again later.

    What may hold a graph is not kept: an object is known by a weak reference, and what takes none must still be the
    value in backward. Otherwise its use is an error.

    Attributes
    ----------
    is_plain : whether no value can hold a graph: all are constants, or lists, dicts and sets of these
    """

    __slots__ = ("_constants", "_known", "_loose", "_read", "is_plain")

    def __init__(self, context: Context) -> None:
        own = [(variable, value) for variable, value in context.items() if not _is_cache(variable)]
        loose = [(variable, value) for variable, value in own if not _is_constant(value)]
        self._loose = [(variable, keeper(f"ContextVar {variable.name}", value)) for variable, value in loose]
        self._constants = Context()
        for variable, value in own:
            if _is_constant(value):
                self._constants.run(variable.set, value)
        self.is_plain = all(_is_plain(value) for _, value in loose)
        self._read = [variable for variable, _ in loose], [*self._constants]
        self._known = len(context), [copy_of(value) for _, value in loose if self.is_plain], [*self._constants.values()]

    @classmethod
    def now(cls, last: ContextValues | None) -> ContextValues:
        """Return the values of now: `last`, if they are the same and plain."""
        context = copy_context()
        return last if last is not None and last.is_plain and last._are(context) else cls(context)

    def _are(self, context: Context) -> bool:
        """Return whether a context has these values. After `torch.compile` it has hundreds of PyTorch's settings."""
        (loose, constants), (size, copies, values) = self._read, self._known
        if len(context) != size or not size:
            return len(context) == size
        same = all(map(is_, map(context.get, constants, repeat(ABSENT)), values))
        return same and all(map(is_same_value, map(context.get, loose, repeat(ABSENT)), copies))

    def run(self, function: Callable[[], _T]) -> _T:
        """Run a function with these values alone. What it sets is gone afterwards."""
        values = [(variable, kept(variable.get(ABSENT))) for variable, kept in self._loose]
        context = self._constants.copy()
        for variable, value in values:
            context.run(variable.set, value)
        return context.run(function)


_CACHES = ("._get_dict_cache", "._get_dict_dirty_keys", "._hash_cache", "._hash_dirty")


def _is_cache(variable: ContextVar[Any]) -> bool:
    """Return whether a variable is one of PyTorch's caches of its own settings, which begin empty without it."""
    return variable.name.startswith("torch.") and variable.name.endswith(_CACHES)


def _is_constant(value: Any) -> bool:
    return is_constant(value) or type(value) is object or type(value).__module__ == "decimal"


def _is_plain(value: Any) -> bool:
    """Return whether a value is a constant, or a container of these that is compared fast."""
    if type(value) in (list, dict):
        return len(value) <= MAX_WAITING_LENGTH and all(map(_is_plain, parts_of(value)))
    return all(type(each) is str for each in value) if type(value) is set else _is_constant(value)
