"""Calls of recomputed modules: the values that a rerun needs, and the outputs that later calls take as input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from actstore.autograd.handles import Kept, is_exact
from actstore.base.ledger import Account
from actstore.base.storage import storages_of
from actstore.base.trees import Form, unflatten
from actstore.errors import StateError
from actstore.model.weights import Weights
from actstore.recompute.chain import CallChain, Carry, Values
from actstore.recompute.decision_modes import Recording, Repeating, modes_paused
from actstore.recompute.decisions import ReluResults
from actstore.recompute.keeping import keeping, serving
from actstore.recompute.region_state import RegionState, ThreadState
from actstore.recompute.running import Booked, FirstRun, LaterRun, RegionParts

if TYPE_CHECKING:
    from actstore.policy import Recompute
    from actstore.recompute.decisions import Decisions, SharedGate


TensorHook = Callable[[Tensor], Tensor | None]


class CallInput(NamedTuple):
    """An input of a call: a carry, or the hooks' handle of a tensor from outside the chain.

    `hooks` are the tensor's own: a gradient that the forward itself computes goes through them. `gate` is the gate that
    an earlier call reads from that handle.
    """

    carry: Carry | None
    handle: Any
    requires_grad: bool
    hooks: tuple[TensorHook, ...]
    gate: SharedGate | None = None


class RegionCall:
    """One call of a recomputed module, and all that a rerun needs.

    Parameters
    ----------
    region : the name of the module and its decision, for messages
    account : the books of its inputs
    leaves : its arguments, flat; tensors among them are released once it has run

    Attributes
    ----------
    decisions : decisions of the first run, if later runs repeat them
    parts : calls of the parts and operators that do not run again; None under a policy without such rules
    is_over : whether the first run has ended
    unsettled : whether the last operator that saves tensors may still write to one of them when it has saved it
    """

    __slots__ = (
        "__weakref__",
        "account",
        "chain",
        "decisions",
        "form",
        "forward",
        "given",
        "is_over",
        "made",
        "number",
        "parts",
        "region",
        "rest",
        "same",
        "saved_nbytes",
        "sources",
        "state",
        "unpack",
        "unsettled",
    )  # fmt: skip

    def __init__(
        self,
        region: str,
        account: Account,
        forward: Callable[..., Any],
        leaves: list[Any],
        form: Form,
        unpack: Callable[[Any], Tensor],
        state: RegionState,
    ) -> None:
        self.region = region
        self.account = account
        self.forward = forward
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # the caller's own, in the first run
        self.form = form
        self.rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.unpack = unpack
        self.state = state
        self.sources: dict[int, CallInput] = {}
        self.same: dict[int, int] = {}  # arguments that are one tensor: `attention(x, x, x)` tests their identity
        self.is_over = False
        self.chain: CallChain | None = None  # None unless its decision replays inputs
        self.number = 0  # in its chain
        self.made: dict[int, ref[Carry]] = {}  # leaves of its output that later calls take
        self.decisions: Decisions | None = None
        self.parts: RegionParts | None = None
        self.saved_nbytes = 0  # saved by autograd in the first run, without the inputs
        self.unsettled = False

    def carries(self) -> Iterator[Carry]:
        """Yield the inputs that other calls of the chain have returned."""
        for source in self.sources.values():
            if source.carry is not None:
                yield source.carry

    @property
    def comes_back_exactly(self) -> bool:
        """True if no input is lossy and no input needs a replay."""
        return all(source.carry is None and is_exact(source.handle) for source in self.sources.values())

    def first_run(self, run: FirstRun | None) -> Any:
        """Run forward on the call's arguments, as `run` where parts of it do not run again."""
        assert self.given is not None
        args, kwargs = self.given
        forward = self.state.first_run(self.forward if run is None else partial(run.run, keeping(run, self.forward)))
        if self.decisions is None:
            return forward(*args, **kwargs)
        mode = Recording(self.decisions)
        if run is not None:
            run.mode = mode
        with mode.around(whole=self._has_inner_rules):
            return forward(*args, **kwargs)

    @property
    def _has_inner_rules(self) -> bool:
        """True where modes of rules for operators are around the region: the mode of decisions must be outside."""
        return self.parts is not None and self.parts.inner is not None

    def ended(self, packs: int) -> None:
        """Note the end of the first run, which has saved `packs` tensors."""
        self.is_over = True
        self.state.ended()
        if self.decisions is not None:
            self.decisions.ended()
        for part in () if self.parts is None else self.parts.calls:
            part.ended(packs, replays=self.chain is not None)

    def prepare_rerun(self) -> tuple[Callable[[], Any], Booked, Repeating | None]:
        """Prepare a rerun on equal inputs. Returns its function, the storages that are booked as held, and its mode.

        The caller rewinds its state. Repeatable, and safe from any thread.
        """
        values = self.chain.values_for(self) if self.chain is not None else {}
        return self._prepare(values)

    def replay(self, values: Values) -> list[Any]:
        """Rerun forward for its output alone, with `values` as its carries. Returns the leaves of the output.

        Gradients are enabled as in the first run, because operators choose kernels by it and their bits differ.
        """
        run, _, _ = self._prepare(values)
        with self.state.rewound(modes_paused()), _no_hooks():
            return tree_leaves(run())

    def _prepare(self, values: Values) -> tuple[Callable[[], Any], Booked, Repeating | None]:
        """Prepare a rerun, with `values` as its carries."""
        if self.parts is not None and not self.is_over:
            raise StateError(
                f"a tensor that {self.region} has saved was read before its forward ended. What runs once or in tiles "
                "is not complete then. Read it after the forward, or leave the rules for parts, tiles, operators and "
                "tags out."
            )
        leaves = self.rest.copy()
        kept: Booked = {}
        fixed: set[int] = set()
        asked = self.decisions is not None or self.parts is not None  # whether anything asks which inputs are exact
        for i, (carry, handle, requires_grad, hooks, gate) in self.sources.items():
            tensor = self.unpack(handle) if carry is None else values[carry]
            if gate is not None:
                gate.settle(tensor)
            source = handle if carry is None else carry.handle
            if type(source) is Kept or (carry is not None and carry.kept):
                kept[tensor.untyped_storage()._cdata] = None
            if asked and (is_exact(source) or getattr(source, "alias", None) is not None):
                fixed.update(storage._cdata for storage in storages_of(tensor))
            alias = leaves[i] = tensor.detach()
            if carry is not None and carry.changed:  # the forward that takes it may write to it
                alias = leaves[i] = alias.clone()
            if requires_grad:
                alias.requires_grad_()
                for hook in hooks:
                    alias.register_hook(hook)
        for i, first in self.same.items():
            leaves[i] = leaves[first]
        args, kwargs = unflatten(leaves, self.form)
        later = None if self.parts is None else LaterRun(self.parts, kept, fixed)
        forward = self.forward if later is None else partial(later.run, serving(later, self.forward))
        if self.decisions is None:
            return partial(self.state.run, partial(forward, *args, **kwargs)), kept, None
        repeating = Repeating(self.decisions, fixed)
        if later is not None:
            later.mode = repeating

        def run() -> Any:
            with repeating.around(whole=self._has_inner_rules):
                return forward(*args, **kwargs)

        ends = None if self.decisions.routing else repeating  # the run at an operator that the mode sees
        return partial(self.state.run, run), kept, ends


class CallOutput(NamedTuple):
    """The output of a call, valid until it changes."""

    root: ref[Tensor]
    call: ref[RegionCall]
    leaf: int
    version: int
    dtype: torch.dtype


class Calls:
    """The recomputed calls of one entry of a store on one thread, and their outputs."""

    def __init__(self) -> None:
        self.state = ThreadState()
        self.weights: dict[object, Weights] = {}  # of the last call, by module
        self.relu_results = ReluResults()
        self._counts: dict[object, int] = {}  # by module: number of its calls, or of the chains that begin with it
        self._made: dict[tuple[Any, ...], CallOutput] = {}
        self._prune_at = 1024

    def count(self, what: object) -> int:
        """Count a call of `what`, or a chain that starts with it. Returns the number before."""
        before = self._counts.get(what, 0)
        self._counts[what] = before + 1
        return before

    def put_out(self, call: RegionCall, leaves: Iterable[Any]) -> None:
        """Register the tensors of a call's output, so that `find` knows them when a later call takes them."""
        for index, leaf in enumerate(leaves):
            key = _key_of(leaf)
            if key is not None:
                self._made[key] = CallOutput(ref(_root_of(leaf)), ref(call), index, leaf._version, leaf.dtype)
        if len(self._made) > self._prune_at:
            self._made = {key: made for key, made in self._made.items() if made.root() is not None}
            self._prune_at = 1024 + 2 * len(self._made)

    def find(self, leaf: Any, decision: Recompute) -> tuple[RegionCall, int] | None:
        """Return the call under `decision` that returned a tensor, and its leaf's index; None if the tensor changed."""
        key = _key_of(leaf)
        made = self._made.get(key) if key is not None else None
        if made is None or made.root() is not _root_of(leaf):
            return None
        call = made.call()
        if call is None or call.chain is None or call.chain.decision != decision:
            return None
        return (call, made.leaf) if (made.version, made.dtype) == (leaf._version, leaf.dtype) else None


def _root_of(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None else base


def _key_of(leaf: Any) -> tuple[Any, ...] | None:
    """Return a key of a plain tensor, which no other live tensor has unless it is equal; None for any other object."""
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.is_nested or leaf.is_inference():
        return None
    return id(_root_of(leaf)), leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg()


def _no_hooks() -> saved_tensors_hooks:
    """Return hooks for a replay, whose saves must reach neither an enclosing recomputation's hooks nor a store's."""
    return saved_tensors_hooks(Tensor.detach, _as_it_is)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
