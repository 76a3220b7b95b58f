"""Recomputed modules: their forward runs again in backward, with their inputs in the store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.jit import ScriptModule
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from actstore.autograd.handles import is_lossy
from actstore.base import cpu_threads
from actstore.base.checkpoints import CHECKPOINTS, in_checkpoint, innermost_pack
from actstore.base.note import Note
from actstore.base.storage import storages_of
from actstore.base.trees import Form, flatten, unflatten
from actstore.errors import PolicyError, StateError
from actstore.model.snapshot import AS_IT_IS
from actstore.model.tree import ModuleTree
from actstore.model.writes import WriteHistory
from actstore.policy import Keep, Recompute
from actstore.recompute import hooks as region_hooks
from actstore.recompute.attributes import Effects
from actstore.recompute.chain import CallChain, Carry
from actstore.recompute.checkpoints import RegionWarnings
from actstore.recompute.decision_modes import Repeating
from actstore.recompute.decisions import Decisions
from actstore.recompute.divergence import RunDifference, divergence
from actstore.recompute.forwards import ForwardWrapper
from actstore.recompute.hooks import FirstHooks
from actstore.recompute.region_state import RegionState, SteadyState
from actstore.recompute.replay import CallInput, Calls, RegionCall
from actstore.recompute.running import FirstRun, LaterRun, OutputReads, RegionParts, RegionRun, compiles, current
from actstore.recompute.schedule import schedule_of
from actstore.recompute.tiles import Run, Slices, is_sum, number_of, runner
from actstore.recompute.token_rules import Dims

if TYPE_CHECKING:
    from actstore.autograd.hooks import Scope
    from actstore.recompute.inner_rules import InnerRules

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # what packs a saved tensor, and what unpacks it

_INDICES = frozenset({"layer_idx", "layer_id"})  # attributes of Transformers' modules, by which they find their values


def has_cache(leaves: Iterable[Any]) -> bool:
    """Return whether a cache is among the arguments of a call."""
    return any(map(_is_cache, map(type, leaves)))


def without_caches(
    module: Module, name: str, region: str, args: tuple[Any, ...], kwargs: dict[str, Any], warned: RegionWarnings
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a recomputed module without empty caches, as Transformers' own checkpoints do.

    Raises
    ------
    StateError : a cache has values for the module already, or lies inside of another argument
    """
    if getattr(module, "_can_checkpoint_with_cache", False):  # Transformers' mark of modules that only read it
        return args, kwargs
    given = [value for value in (*args, *kwargs.values()) if _is_cache(value.__class__)]
    for cache in given:
        if _has_values(cache, module):
            raise StateError(
                f"{region} is given a {type(cache).__name__} that has values already: its second run would append to "
                f"that once more. Write '{name} : keep', or call the model without a cache.",
                module=name,
            )
    rest = {key: None if _is_cache(value.__class__) else value for key, value in kwargs.items()}
    if given and rest.get("use_cache"):
        rest["use_cache"] = False
    found = tuple(None if _is_cache(value.__class__) else value for value in args), rest
    if has_cache(tree_leaves(found)):
        raise StateError(
            f"{region} is given a cache inside of another argument: its second run would append to that once more. "
            "Call the model with use_cache=False.",
            module=name,
        )
    warned.tell_cache(region, type(given[0]).__name__)
    return found


def _has_values(cache: Any, module: Module) -> bool:
    """Return whether a cache has values for a module: other modules may have written to it in this forward."""
    indices = {vars(part)[name] for part in module.modules() for name in _INDICES & vars(part).keys()}
    parts = [each for each in vars(cache).values() if _is_cache(each.__class__)] or [cache]
    layers = [layer for part in parts for i, layer in enumerate(part.layers) if not indices or i in indices]
    values = [each for each in tree_leaves([vars(layer) for layer in layers]) if isinstance(each, Tensor)]
    return any(each.ndim > 1 and each.numel() for each in values)  # all but numbers, such as the size of a window


@functools.cache
def _is_cache(kind: type) -> bool:
    """Return whether it is Transformers' cache of keys and values."""
    return any((base.__module__, base.__name__) == ("transformers.cache_utils", "Cache") for base in kind.__mro__)


class Entered(Protocol):
    """An entry of a store on one thread."""

    scope: Scope
    calls: Calls


class RecomputedModule(ForwardWrapper):
    """One module whose forward is a recomputed region while a store is active.

    It acts on threads that have entered the store, and calls through on other threads.

    Parameters
    ----------
    entry_of : returns the store's entry on this thread, if it is the innermost one
    warned : the warnings of recomputed modules
    alike : number of modules that the same rule matches: the first guess at the length of a chain
    once : all modules of the policy that do not run again, with the regions around them
    idle : those of them that this region does not run again
    inner : the rules for tensors inside of it; None for none
    tiled : whether modules inside of it run in tiles

    Raises
    ------
    PolicyError : the module has no forward that can run again
    """

    def __init__(
        self,
        name: str,
        module: Module,
        decision: Recompute,
        entry_of: Callable[[], Entered | None],
        warned: RegionWarnings,
        alike: int = 1,
        once: frozenset[Module] = frozenset(),
        idle: frozenset[Module] = frozenset(),
        inner: InnerRules | None = None,
        tiled: bool = False,
    ) -> None:
        scripted = next((path for path, part in module.named_modules() if isinstance(part, ScriptModule)), None)
        if scripted is not None:  # an exception ends a recomputation, and TorchScript's interpreter replaces it
            where = ".".join(filter(None, (name, scripted)))
            raise PolicyError(
                f"'{name} : {decision}' recomputes {where!r}, which is TorchScript: PyTorch's checkpoint fails there. "
                f"Put a rule such as '{name} : raw' before, or use the module from before torch.jit.script or trace.",
                module=where,
            )
        if type(module).forward is Module.forward:
            raise PolicyError(
                f"'{name} : {decision}' recomputes a {type(module).__name__}, which has no forward of its own. "
                f"Name what it holds: '{name}.* : {decision}'.",
                module=name,
            )
        super().__init__(name, module)
        self._once = once
        self._idle = idle
        self._inner = inner
        self._tiled = tiled
        self._lossy = inner is not None and inner.lossy
        self._region = f"{name} ({decision})"  # for messages
        self._decision = decision
        self._replays = decision.replays
        # whether a second run repeats the decisions of the first, where what it computes from is inexact
        self._repeats = decision.keeps_decisions or (self._lossy and decision.decisions != "anew")
        self._entry_of = entry_of
        self._warned = warned
        self._alike = alike
        parts = [part for part in module.modules() if part is not module]
        self._compiled = any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in parts)
        self._routes = decision.decisions is None  # the first call tells whether it does
        self._lazy = _is_lazy(module)
        self._watches = True  # which outputs of parts the region reads: the first call tells whether one has several
        self._lengths: dict[int, int] = {}
        self._numbers: dict[Any, int] = {}  # of slices, where "auto" chose them
        self._checked: dict[Any, list[Dims]] = {}  # by kind of arguments whose tokens the module treats each by itself
        self._writes = WriteHistory()
        self._tree: ModuleTree | None = None  # of the last call,
        self._steady: SteadyState | None = None  # and what the next one can share with it

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        entry, region = self._entry_of(), current()
        records = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if records and region is not None and self._runs_inside(region, entry):
            return self._inside(region, entry, forward, args, kwargs)
        if entry is None:
            return forward(*args, **kwargs)
        if not records or (pack := innermost_pack()) is None or _in_region(pack):  # None: in a loss that runs in tiles
            if not self._warned.doubled and in_checkpoint():
                self._warned.tell_inside(self._region)
            return forward(*args, **kwargs)
        if forward_ad._current_level >= 0:  # a second run has no tangents, and so saves other tensors
            return forward(*args, **kwargs)
        self._lazy = self._lazy and _is_lazy(self._module)
        if self._lazy:
            return forward(*args, **kwargs)
        if not cpu_threads.is_settled():  # its operators may get another number of threads half way
            return forward(*args, **kwargs)
        hooks: Hooks = _top_saved_tensors_default_hooks(False)  # the store's, or hooks that were entered inside
        if self._decision.tiles is None:
            return self._recomputed(entry, hooks, forward, args, kwargs)[0]
        slices, run, form = self._slices(entry, forward, args, kwargs)
        if is_sum(kinds := self._check(slices, run)):
            return slices.add(run, kinds)

        def again(*args: Any, **kwargs: Any) -> Any:
            return run(flatten(args, kwargs)[0])

        parts = (unflatten(part, form) for part in slices.parts)
        return slices.join([self._recomputed(entry, hooks, again, *part)[0] for part in parts])

    def _slices(
        self, entry: Entered | None, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Slices, Run, Form]:
        """Return the slices of the arguments of a call, what runs the forward on one, and the form of the arguments."""
        leaves, form = flatten(args, kwargs)
        storages = None if entry is None else entry.scope.storages

        def copied(leaf: Tensor) -> None:
            if storages is not None and torch._C._current_graph_task_id() == -1:  # not in a later run
                storages.leave_out(leaf)

        run = runner(forward, leaves, form, copied)
        number = number_of(self._decision.tiles or 1, leaves, run, self._region, None, self._numbers)
        return Slices(leaves, number, self._region), run, form

    def _check(self, slices: Slices, run: Run) -> list[Dims]:
        """Check that the module treats each token by itself, where there are several slices."""
        return slices.check(run, self._checked, self._module.training) if len(slices.parts) > 1 else []

    def _runs_inside(self, region: RegionRun, entry: Entered | None) -> bool:
        """Return whether this module is to run in tiles in a run of a region around it."""
        if self._decision.tiles is None or region.hook is not innermost_pack():
            return False
        return entry is not None if isinstance(region, FirstRun) else region in self.users  # the store may be left

    def _inside(
        self,
        region: RegionRun,
        entry: Entered | None,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run in tiles inside a region, which saves the inputs of all slices before the first one runs.

        So the region's later runs end there, where backward needs nothing after this module.

        Raises
        ------
        StateError : as for `Slices.check`; or the module returns sums over tokens
        """
        with region.paused():
            slices, run, _ = self._slices(entry, forward, args, kwargs)
        call: TiledCall = region.next(self) if isinstance(region, LaterRun) else TiledCall(self)
        if isinstance(region, FirstRun):
            with region.paused():
                if is_sum(self._check(slices, run)):
                    raise StateError(
                        f"{self._region} returns sums over tokens inside the recomputed region {region.parts.region}: "
                        "the gradients of a loss in tiles are computed in forward, and a region runs that twice. Leave "
                        f"one of the two rules out, or write '{self.name} : keep' to run the loss once.",
                        module=self.name,
                    )
        pack, unpack = _top_saved_tensors_default_hooks(False)
        packed = [{id(leaf): pack(leaf) for leaf in part if isinstance(leaf, Tensor)} for part in slices.parts]
        if isinstance(region.mode, Repeating):
            region.mode.skip(0)  # which ends the run if backward needs nothing more
        with region.paused():
            if isinstance(region, LaterRun):
                outputs = [call.again(run, number, part) for number, part in enumerate(slices.parts)]
            else:
                assert entry is not None
                repeats = region.mode is not None and not region.mode.routing
                outputs = []
                for part, handles in zip(slices.parts, packed, strict=True):
                    hooks = (lambda leaf, handles=handles: handles[id(leaf)]), unpack
                    output, decisions = self._recomputed(entry, hooks, run, (part,), {}, repeats=repeats)
                    outputs.append(output)
                    call.decisions.append(decisions)
                region.parts.calls.append(call)
        return slices.join(outputs)

    def _recomputed(
        self,
        entry: Entered,
        outside: Hooks,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        repeats: bool = False,
    ) -> tuple[Any, Decisions | None]:
        """Run a call of the region, whose inputs wait by the hooks around it.

        Parameters
        ----------
        repeats : whether the inputs are inexact when it runs again, and the decisions of the first run are repeated

        Returns
        -------
        tuple : the output, and the decisions that later runs repeat
        """
        first = self._decision.first
        scope, calls = entry.scope, entry.calls
        if first is not None and calls.count(self) >= first:
            return forward(*args, **kwargs), None
        tracker = scope.tracker
        depth, hidden = len(tracker.stack), tracker.hidden
        leaves, form = flatten(args, kwargs)
        if has_cache(leaves):
            args, kwargs = without_caches(self._module, self.name, self._region, args, kwargs, self._warned)
            leaves, form = flatten(args, kwargs)
        call = self._take(scope, calls, outside, forward, leaves, form, repeats=repeats or self._repeats)
        call.given = args, kwargs
        hooks = FirstHooks(scope, call, self._diverged)
        begun: FirstRun | None = None
        if call.parts is not None:
            watches = self._watches and not (self._compiled or compiles())
            replays = call.chain is not None
            begun = FirstRun(call.parts, scope, outside[0], lambda: hooks.packs, replays=replays, watches=watches)
        if call.chain is not None:
            tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
            hooks.inputs = {storage._cdata for tensor in tensors for storage in storages_of(tensor)}
        try:
            output = hooks.run(begun)
        except BaseException:
            call.state.failed()
            raise
        finally:
            call.given = None
            tracker.unwind(depth)  # after an interrupt, inner calls are still on the stack
        call.ended(hooks.packs)
        if begun is not None and begun.reads is not None:
            self._watches = begun.drop_unread()
        self._steady = call.state.steady
        if self._steady is None:
            call.state.weights = calls.weights[self] = call.state.weights.one_of(calls.weights.get(self))
        if call.decisions is not None and call.decisions.routing and not call.decisions.kept:
            call.decisions, self._routes = None, False
        if call.decisions is not None:
            calls.relu_results.add(call.decisions)
        if call.chain is not None:
            call.saved_nbytes = hooks.nbytes
            calls.put_out(call, tree_leaves(output))
        if tracker.hidden != hidden:
            self._warned.tell_around(self._region)
        return output, call.decisions

    def _diverged(self, call: RegionCall, difference: RunDifference) -> StateError:
        """Return the error for a second run that has saved other tensors than the first."""
        repeats = call.decisions is not None and not call.decisions.routing

        def run() -> None:
            with call.state.rewound():
                call.prepare_rerun()[0]()

        return divergence(
            self.name, self._decision, difference, repeats=repeats, parts=call.parts is not None, run_again=run
        )

    def _take(
        self,
        scope: Scope,
        calls: Calls,
        outside: Hooks,
        forward: Callable[..., Any],
        leaves: list[Any],
        form: Form,
        *,
        repeats: bool,
    ) -> RegionCall:
        """Return a call that begins. The store has its tensors, also those of keyword arguments and containers."""
        pack, unpack = outside
        tracker, place = scope.tracker, scope.tracker.place_of(self._module)
        steady = self._steady
        if steady is not None and steady.is_same():
            tree = steady.tree
        else:
            tree = self._tree = ModuleTree.now(self._module, self._idle, self._tree)
            steady = None
        state = RegionState(tree, leaves, calls.state, self._writes, steady)
        call = RegionCall(self._region, place.account(0), forward, leaves, form, unpack, state)
        if isinstance(self._decision.inputs, Keep):  # otherwise the decision of the inputs is more specific
            call.account.decision = self._decision
        carries = self._join(scope, calls, call, leaves) if self._replays else {}
        tracker.push(None, place, self._decision.inputs)
        try:
            places: dict[int, int] = {}
            for i, leaf in enumerate(leaves):
                if not isinstance(leaf, Tensor):
                    self._refuse_iterator(leaf)
                    continue
                first = places.setdefault(id(leaf), i)
                if first != i:
                    call.same[i] = first
                    continue
                if leaf.is_inference():
                    raise StateError(
                        f"Inference tensors cannot be saved for backward: an input of {call.region} is one."
                    )
                carry = carries.get(i)
                hooks = tuple(leaf._backward_hooks.values()) if leaf._backward_hooks else ()
                if carry is None:
                    handle = pack(leaf)
                    gate = calls.relu_results.take(leaf, handle, unpack)
                    call.sources[i] = CallInput(None, handle, leaf.requires_grad, hooks, gate)
                    continue
                if carry.live:
                    carry.handle = tracker.pack_as(pack, leaf, Keep())
                elif carry.handle is None:
                    carry.handle = pack(leaf)
                call.sources[i] = CallInput(carry, None, leaf.requires_grad, hooks)
        finally:
            index = tracker.frame.index
            tracker.pop()
        call.decisions = self._decisions(scope, call, repeats=repeats)
        if self._inner is not None:  # its results are accounts beside those of the inputs
            tracker.frame.index = max(tracker.frame.index, index)
        if self._once or self._tiled or self._inner is not None:
            call.parts = self._parts(call)
        return call

    def _decisions(self, scope: Scope, call: RegionCall, *, repeats: bool) -> Decisions | None:
        """Return what keeps the decisions of a call that begins; None where later runs decide for themselves."""
        if repeats and (self._decision.decisions == "kept" or self._lossy or not call.comes_back_exactly):
            return Decisions(self._region, scope.ledger, call.account, self._compiled)
        if self._routes and not (repeats or self._compiled or compiles()):
            return Decisions(self._region, scope.ledger, call.account, routing=True)
        return None

    def _parts(self, call: RegionCall) -> RegionParts:
        """Return the calls of excepted parts in a call that begins: none so far."""
        handles = [source.handle if source.carry is None else source.carry.handle for source in call.sources.values()]
        exact = not (self._repeats or self._lossy) and not any(map(is_lossy, handles))
        return RegionParts(self._region, self._once, exact, call.state.generators, call.unpack, self._inner, [], [])

    def _refuse_iterator(self, leaf: Any) -> None:
        if isinstance(leaf, Iterator):
            raise StateError(
                f"{self._region} is given a {type(leaf).__name__}: its second run would find that iterator used up. "
                "Give it a list or a tuple, or write keep in place of recompute.",
                module=self.name,
            )

    def _join(self, scope: Scope, calls: Calls, call: RegionCall, leaves: list[Any]) -> dict[int, Carry]:
        """Add a call to a chain. Returns those of its inputs that the chain has returned, by leaf."""
        decision = self._decision
        found = {i: made for i, leaf in enumerate(leaves) if (made := calls.find(leaf, decision)) is not None}
        chain = max(found.values(), key=lambda made: made[0].number)[0].chain if found else None
        if chain is None:
            nth = calls.count((self, CallChain))
            expected = self._lengths.get(nth, self._alike)
            chain = CallChain(decision, schedule_of(decision, expected), scope.ledger, self._lengths, nth)
            if calls.count(CallChain):
                call.account.note = Note("begins another chain: no recomputed call returned its inputs")
        last = chain.arrive(call)
        carries = {}
        for i, (producer, index) in found.items():
            if producer.chain is not chain:
                continue
            weak = producer.made.get(index)
            carry = weak() if weak is not None else None
            if carry is None:
                carry = Carry(producer, index, call.number, leaves[i], any_version=scope.allows_mutation())
                producer.made[index] = ref(carry)
            if carry.handle is None:
                carry.live = producer.number >= last  # otherwise a replay of the calls after `last` needs it, too
                if carry.live:
                    chain.hold(carry)
            carries[i] = carry
        return carries


class TiledCall:
    """One call of a module that runs in tiles, in the first run of a region around it, and what later runs need.

    Attributes
    ----------
    part : the module
    decisions : of each slice that later runs repeat
    effects : on attributes; none, as the module runs again
    """

    __slots__ = ("decisions", "effects", "part")

    def __init__(self, part: RecomputedModule) -> None:
        self.part = part
        self.decisions: list[Decisions | None] = []
        self.effects = Effects([], [], [])

    def ended(self, packs: int, *, replays: bool) -> None:
        """Note that the region has run."""

    def drop_unread(self, reads: OutputReads) -> bool:
        """Return False: nothing waits."""
        return False

    def again(self, run: Run, number: int, part: list[Any]) -> Any:
        """Run a slice for its output alone, in a later run of the region. Backward runs it again for what it saves."""
        decisions = self.decisions[number]
        repeating = AS_IT_IS if decisions is None else Repeating(decisions, set()).around(whole=False)
        with saved_tensors_hooks(_drop, _drop), repeating:
            return run(part)


def _drop(_: object) -> Any:
    """Save nothing."""


def _is_lazy(module: Module) -> bool:
    """Return whether a module has weights or buffers that its next forward makes."""
    return any(map(is_lazy, (*module.parameters(), *module.buffers())))


def _in_region(pack: Any) -> bool:
    """Return whether a checkpoint or another region reruns this call as a whole."""
    return getattr(pack, "__module__", "") in REGIONS


REGIONS = (*CHECKPOINTS, region_hooks.__name__)  # modules whose hooks save nothing
