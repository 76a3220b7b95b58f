"""The state that a region finds again when it runs again, beside its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from actstore.errors import StateError
from actstore.model.generators import GeneratorStates
from actstore.model.parametrizations import CachedWeights
from actstore.model.snapshot import AS_IT_IS, Snapshot
from actstore.model.torch_settings import TorchSettings, UserModes
from actstore.model.tree import ABSENT, CONTAINERS, ModuleTree, is_constant
from actstore.model.weights import Weights
from actstore.model.writes import WriteHistory
from actstore.recompute.attribute_values import can_wait, copy_of, hidden_by_code, hidden_by_write, recognizer
from actstore.recompute.attributes import AttributeStates
from actstore.recompute.reached import ReachedState

_T = TypeVar("_T")
_STATELESS = {torch.device("cpu"), torch.device("meta")}  # or devices with a generator that is always known


class ThreadState:
    """The state of the last call of a region on this thread, with which the next one shares what is the same."""

    def __init__(self) -> None:
        self.generators: GeneratorStates | None = None
        self.settings: TorchSettings | None = None

    def close(self) -> None:
        """Drop what the last call need not keep, as no other one follows."""
        if self.generators is not None:
            self.generators.drop_unchanged()


class RegionState:
    """Snapshots from before the first run of a region, which take their parts from one walk over its modules.

    Parameters
    ----------
    leaves : the arguments of the call, flat
    last : of the last call on this thread
    writes : what earlier calls of the region have written to
    """

    __slots__ = ("_context", "_has_failed", "_modes", "_snapshots", "generators", "weights")

    def __init__(self, tree: ModuleTree, leaves: Sequence[Any], last: ThreadState, writes: WriteHistory) -> None:
        loose = tree.loose()
        found = [*leaves, *tree.generators]
        snapshots: list[Snapshot] = []
        if not _is_gathered(tree):
            reached = ReachedState(tree, loose)
            snapshots += AttributeStates(tree, loose), reached
            found += reached.generators
        for each in loose:
            if type(each.value) in (list, dict, tuple):
                found += each.value.values() if isinstance(each.value, dict) else each.value
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)} - _STATELESS
        last.generators = self.generators = GeneratorStates(tree.recurrent, devices, last.generators, found)
        last.settings = settings = TorchSettings.now(last.settings)
        self.weights = Weights(tree, loose, writes, hidden_by_write)
        self._snapshots: Sequence[Snapshot] = (settings, *snapshots, CachedWeights())
        self._modes = UserModes()
        self._context = ContextValues()
        self._has_failed = False

    def ended(self) -> None:
        """Mark the end of the first run."""
        for each in self._snapshots:
            each.ended()
        self.weights.ended()
        self.generators.ended()

    def failed(self) -> None:
        """Mark the end of the first run by an error, and let go of what attributes had: it may hold the graph."""
        self._snapshots, self._has_failed = (), True

    def rewound(self) -> AbstractContextManager[Any]:
        """Put the state from before the first run back, and return a context at whose end that of now comes back.

        Raises
        ------
        StateError : the first run ended in an error
        """
        if self._has_failed:
            raise StateError(
                "a tensor that a recomputed module has saved is read, and the forward of the module ended in an error. "
                "Run the forward again, or write keep in place of recompute."
            )
        stack = ExitStack()
        try:
            for each in (*self._snapshots, self.weights, self.generators, self._modes):  # modes would see all before
                if (context := each.rewound()) is not AS_IT_IS:
                    stack.enter_context(context)
            stack.enter_context(_outside_of_vmap())
        except BaseException:
            stack.close()
            raise
        return stack

    def run(self, function: Callable[[], _T]) -> _T:
        """Run a function with the context variables from before the first run."""
        return self._context.run(function)


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
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = [(variable, _kept(variable, value)) for variable, value in copy_context().items()]

    def run(self, function: Callable[[], _T]) -> _T:
        """Run a function with these values alone. What it sets is gone afterwards."""
        values = [(variable, kept(variable.get(ABSENT))) for variable, kept in self._values]
        context = Context()
        for variable, value in values:
            context.run(variable.set, value)
        return context.run(function)


def _kept(variable: ContextVar[Any], value: Any) -> Callable[[Any], Any]:
    """Return the function from the value now to that of the second run."""
    if is_constant(value):
        return lambda _: value
    name = f"ContextVar {variable.name}"
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
    return lambda now: now if is_same(now) else hidden_by_code(name)
