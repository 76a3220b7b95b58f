"""Runs of recomputed regions on this thread, for the parts that are excepted from them, and what they read of these."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import local
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.nn import Module
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from actstore.base.checkpoints import innermost_pack
from actstore.errors import StateError
from actstore.model.generators import GeneratorStates
from actstore.recompute.attributes import Effects, hidden
from actstore.recompute.decision_modes import DecisionMode
from actstore.recompute.forwards import ForwardWrapper

if TYPE_CHECKING:
    from actstore.autograd.hooks import Scope
    from actstore.recompute.inner_rules import InnerRules

_NOTHING: AbstractContextManager[Any] = nullcontext()


def compiles() -> bool:
    """Return whether `torch.compile` was called: the compiler leaves functions alone that are called below a mode."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(backend is not None for backend in backends.values())


class OutputReads(TorchFunctionMode):
    """Mode that sees which outputs of excepted parts the first run of a region reads.

    It sees PyTorch's functions and methods, also those that compute no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[int, Tensor] = {}  # by identity, alive until the region ends
        self._read = set[int]()

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """See reads of these tensors from now on."""
        self._watched.update((id(tensor), tensor) for tensor in tensors)

    def note(self, values: Iterable[Any]) -> None:
        """Count watched tensors among values as read."""
        self._read.update(id(value) for value in _leaves(values) if id(value) in self._watched)

    def has_read(self, tensors: Sequence[int]) -> bool:
        """Return whether any of the tensors with these identities was read."""
        return not self._read.isdisjoint(tensors)

    def paused(self) -> AbstractContextManager[Any]:
        """Return a context without the mode, for a part: compilers see modes. One that lies below another stays."""
        count = _len_torch_function_stack()
        return _pop_mode_temporarily() if count and _get_function_stack_at(count - 1) is self else _NOTHING

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._watched:
            self.note((*args, *kwargs.values()) if kwargs else args)
        return func(*args, **(kwargs or {}))


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        elif isinstance(value, dict):
            yield from _leaves(value.values())
        else:
            yield value


_thread = local()  # .run: the innermost run of a region


class PartCall(Protocol):
    """A call of an excepted part.

    Attributes
    ----------
    effects : of the call on attributes of modules
    """

    effects: Effects

    @property
    def part(self) -> ForwardWrapper:
        """Return the part."""

    def ended(self, packs: int, *, replays: bool) -> None:
        """Note that the region has run, which has saved `packs` tensors."""

    def drop_unread(self, reads: OutputReads) -> bool:
        """Drop what the region has not read of the output. Return whether the output has several payloads."""


class ResultCall(Protocol):
    """A call of an operator that a rule names, or of `tag`.

    Attributes
    ----------
    operator : its name
    shape : of its first tensor
    """

    operator: str
    shape: tuple[int, ...]


class KeptResult(Protocol):
    """The result of an operator that later runs get as it is."""

    def watch(self, tensor: Tensor) -> None:
        """Note an alias of its memory that a later run has saved: backward must not write to it."""


Booked = dict[int, KeptResult | None]  # by storage


class RegionParts(NamedTuple):
    """The calls of excepted parts and operators in one call of a region, and what they need of that.

    Attributes
    ----------
    region : the name of the module and its decision, for messages
    once : all modules of the policy that do not run again: it tells the policy, too
    exact : whether the inputs of the region come back exactly
    generators : their states before the region
    unpack : reads what was saved outside of the region
    inner : the rules for tensors inside of it; None for none
    calls : of parts, in the order of the first run
    results : calls of operators that the rules may be for, and tags, in the same order
    """

    region: str
    once: frozenset[Module]
    exact: bool
    generators: GeneratorStates
    unpack: Callable[[Any], Tensor]
    inner: InnerRules | None
    calls: list[PartCall]
    results: list[ResultCall]


class RegionRun:
    """One run of a region.

    Attributes
    ----------
    parts : the calls of excepted parts
    hook : the pack hook of the region; where another one is innermost, no part is excepted
    mode : the mode that keeps or repeats decisions; None for no mode
    tag : returns a tensor with a tag, or what takes its place; None without rules for that
    """

    __slots__ = ("hook", "mode", "parts", "tag")

    def __init__(self, parts: RegionParts) -> None:
        self.parts = parts
        self.hook: Any = None
        self.mode: DecisionMode | None = None
        self.tag: Callable[[Tensor, str], Tensor] | None = None

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the region's forward."""
        self.hook = innermost_pack()
        with running(self):
            return forward(*args, **kwargs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run a part that belongs to no region, and whose decisions are neither kept nor repeated."""
        mode = self.mode
        with running(None):
            if mode is not None:
                mode.paused = True
            try:
                yield
            finally:
                if mode is not None:
                    mode.paused = False


class FirstRun(RegionRun):
    """The run of a region in forward.

    Attributes
    ----------
    scope : the state of the store's hooks
    pack : the hook around the region, which is the store's, or one that was entered inside of that
    count : returns how many tensors the region has saved so far
    replays : whether later runs may be for the region's output
    reads : sees which outputs of excepted parts the region reads; None where all are kept
    """

    __slots__ = ("count", "pack", "reads", "replays", "scope")

    def __init__(
        self,
        parts: RegionParts,
        scope: Scope,
        pack: Callable[[Tensor], Any],
        count: Callable[[], int],
        *,
        replays: bool,
        watches: bool = False,
    ) -> None:
        super().__init__(parts)
        self.replays = replays
        self.reads = OutputReads() if watches and not replays else None
        self.scope = scope
        self.pack = pack
        self.count = count

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _NOTHING if self.reads is None else self.reads:
            return super().run(forward, *args, **kwargs)

    def drop_unread(self) -> bool:
        """Drop outputs of parts that the region has not read. Return whether a part has an output of several."""
        reads, self.reads = self.reads, None
        return reads is not None and sum(call.drop_unread(reads) for call in self.parts.calls) > 0


class LaterRun(RegionRun):
    """A run of a region in backward. Its excepted parts do not run.

    Attributes
    ----------
    booked : the storages that are booked as held already, with the result of an operator that each is
    fixed : the storages that came back exactly
    """

    __slots__ = ("_next", "booked", "fixed")

    def __init__(self, parts: RegionParts, booked: Booked, fixed: set[int]) -> None:
        super().__init__(parts)
        self.booked = booked
        self.fixed = fixed
        self._next = 0

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wrappers = {call.part for call in self.parts.calls}
        for wrapper in wrappers:  # the store may have been left, and its wrappers with it
            wrapper.enter(self)
        try:
            with hidden([call.effects for call in self.parts.calls]):
                return super().run(forward, *args, **kwargs)
        finally:
            for wrapper in wrappers:
                wrapper.exit(self)

    def next(self, part: ForwardWrapper) -> Any:
        """Return the next call of an excepted part, which must be one of this part.

        Raises
        ------
        StateError : the region goes another way than in its first run
        """
        calls = self.parts.calls
        call = calls[self._next] if self._next < len(calls) else None
        if call is None or call.part is not part:
            was = "no further one" if call is None else f"one of {call.part.name}"
            raise self.differs(
                part.name, f"its call {self._next + 1} of an excepted part is one of {part.name}, and was {was}"
            )
        self._next += 1
        return call

    def differs(self, module: str, how: str) -> StateError:
        """Return the error for a region that goes another way."""
        return StateError(
            f"The second run of {self.parts.region} goes another way than its first: {how}.\n"
            "A Python value or a global has changed since.\n"
            "Give that to the module as an argument, or do not recompute it: write keep in place of recompute.",
            module=module,
        )


def current() -> RegionRun | None:
    """Return the run of a region on this thread; None outside of all, and in an excepted part."""
    run: RegionRun | None = getattr(_thread, "run", None)
    return run


@contextmanager
def running(run: RegionRun | None) -> Iterator[None]:
    """Make `run` the current one of this thread for a while."""
    before = current()
    _thread.run = run
    try:
        yield
    finally:
        _thread.run = before
