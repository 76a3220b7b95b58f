"""ActivationStore: the context manager that users put around a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from math import inf
from threading import Lock
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn import Module

from actstore.accuracy import Sampler
from actstore.accuracy.influence.influence import Influence
from actstore.autograd.hooks import Scope
from actstore.autograd.tracker import Tracker
from actstore.autograd.unpack import forget_turn, turns
from actstore.base.ledger import Ledger
from actstore.base.units import parse_nbytes
from actstore.devices import cpu_memory
from actstore.errors import StateError
from actstore.model.names import named_modules
from actstore.model.units import device_of
from actstore.plan.plan import Plan
from actstore.policy import Auto, Bits, Decision, Policy, Rules, may_be_lossy
from actstore.recompute.checkpoints import RegionWarnings
from actstore.session.arguments import check_plan, check_seed, listed, read_chooser, read_model, read_policy
from actstore.session.compiling import StoreGraphs
from actstore.session.controllers import controller_of, window_of
from actstore.session.entries import StoreEntry, check_nested, entries, entry_to_leave, refuse_checkpointed_region
from actstore.session.fitted import Fitted
from actstore.session.observers import SampleErrors, Verify, read_observers
from actstore.session.out_of_memory import explain
from actstore.session.process import Optimizers
from actstore.session.retry import call_inside
from actstore.session.state import StoreState
from actstore.store.store import Store
from actstore.store.tierset import StoreOptions, open_device
from actstore.tiers import Disk, Group, Host, PluginTier, Window
from actstore.tiers.options import read_tiers
from actstore.trace import Trace

P = ParamSpec("P")
R = TypeVar("R")

MIN_NBYTES = 256 * 1024  # smaller tensors are kept: together they are a few per cent, and each costs as much work


class ActivationStore(StoreGraphs):
    """The store of a model's activations, which decides for each of them where it waits for backward.

    Use it as a context manager around forward, again and again, or as a decorator of a function. Backward may run
    inside or outside of the context. Nothing in the model changes.

    Parameters
    ----------
    model : Module, optional; names in `policy` are the names of its modules. Without a model, one decision holds for
        all tensors.
    policy : text such as ``"blocks.*.attn : int8 @ host"``, or ``"int8"`` for all tensors; or Rules, a Decision, or any
        function ``(Site, Spec) -> Decision``; or `Auto`, `Bits` (as text, ``"auto(20GiB)"``), or a Plan from "auto".
        In text and Rules ``@blocks``, ``@attention``, ``@mlp`` and ``@norm`` stand for these parts of the model,
        whatever their names, and ``@blocks[::2]`` for some of them
    tiers : options of the tiers, `Group`, `Host`, `Disk` and `PluginTier`, and of the bytes on their way, `Window`. A
        tier that a policy names needs no options, but for `group`
    observe : `SampleErrors`, which is on by default, `Trace` and `Verify`
    min_bytes : smaller tensors are kept as they are; 0 keeps none for its size
    strict : whether a full tier is an error; by default, a tensor that does not fit is kept
    allow_mutation : whether a saved tensor may be changed in place before backward. Where a copy was stored, backward
        then sees the value at the time of saving; where the tensor was kept, a change is an error all the same.
    seed : seed of the random bits of `round=stochastic` and `round=dither`; the same seed and program give the same
        bytes. The store does not touch PyTorch's generators

    Raises
    ------
    PolicyError, ChainError, UnknownCodecError : the policy does not parse, or does not fit the model
    ConfigError : an argument is invalid, the disk tier's folder cannot be written, a tier cannot work here, or the
        model is on several devices

    Warns
    -----
    RuntimeWarning : in a sampled step, a site lost elements (`ErrorFigures.lost`), its values shrank or grew
        by more than rounding explains (`ErrorFigures.shrunk`), or its error is above `SampleErrors.warn`

    Notes
    -----
    Thread-safe: several threads may enter one store; each follows its own forward. A lossless policy (keep, recompute,
    raw) gives gradients equal bit for bit to those without a store.

    A copy or a pickle of a store is a new store with the same arguments, without payloads, measurements or events.
    """

    _open_device = staticmethod(open_device)

    def __init__(
        self,
        model: Module | None = None,
        policy: str | Rules | Decision | Policy | Auto | Bits | Plan = "keep",
        *,
        tiers: Iterable[Group | Host | Disk | PluginTier | Window] = (),
        observe: Iterable[SampleErrors | Trace | Verify] = (),
        min_bytes: int | str = MIN_NBYTES,
        strict: bool = False,
        allow_mutation: bool = False,
        seed: int = 0,
    ) -> None:
        self._model = read_model(model)
        options, window = read_tiers(tiers := listed(tiers))
        observers = read_observers(observe := listed(observe))
        self._given_policy = policy
        self._options = {"tiers": tiers, "min_bytes": min_bytes, "strict": strict, "allow_mutation": allow_mutation}
        self._options |= {"seed": check_seed(seed)}
        self._observe = observe
        self._chooser = chooser = read_chooser(model, policy)
        self._given_plan = policy if isinstance(policy, Plan) else None
        if self._given_plan is not None:
            check_plan(self._given_plan, model)
        self._min_nbytes = parse_nbytes(min_bytes, "min_bytes")
        self._allow_mutation = allow_mutation
        self._lock = Lock()
        self._inside = set[StoreEntry]()  # of all threads
        self._closed = False
        self._warned = RegionWarnings()
        self._ledger = ledger = Ledger()
        if self._given_plan is not None:
            ledger.budget.set(self._given_plan.budget)
        self._fitted = self._fit(read_policy("keep" if chooser is not None else policy, model))
        self._sampler = Sampler(ledger, *vars(observers.sample).values())
        self._influence = Influence(model, ledger, self._sampler.relative) if model is not None else None
        self._optimizers = None if model is None else Optimizers(model)
        self._controller = controller_of(
            chooser,
            options,
            model,
            ledger,
            self._influence,
            self._sampler.ask,
            self._switch,
            sets_window=window.nbytes is None,
        )
        if observers.trace is not None:
            observers.trace.claim()
        window = window_of(window, self._given_plan, chooser)
        self._store = Store(
            StoreOptions(options, window, strict, seed, observers.trace, observers.verify, self._open_device),
            ledger,
            self._sampler,
            None if self._controller is None else self._controller.gauge,
        )
        rules = self._fitted.policy
        self._store.open(device_of(model), rules.tiers if isinstance(rules, Rules) else ())

    def __reduce__(self) -> tuple[Any, ...]:
        observe = [Trace(each.limit) if isinstance(each, Trace) else each for each in self._observe]
        return _remake, (self._model, self._given_policy, {**self._options, "observe": observe})

    def __repr__(self) -> str:
        of = "" if self._model is None else f" of {type(self._model).__name__}"
        policy = self._given_policy
        text = " ".join(str(policy).split()) if isinstance(policy, str) else str(policy).replace("\n", "; ")
        state = "closed" if self._closed else "entered" if self._inside else f"{self._store.steps} steps"
        return f"<ActivationStore{of}: {text!r}, {state}>"

    def __enter__(self) -> ActivationStore:
        refuse_checkpointed_region()
        if self._closed:
            raise StateError("this store is closed. Make a new ActivationStore.")
        entry = None
        try:
            with self._lock:
                first = not self._inside
                entry = StoreEntry(self, self._scope(first=first), self._controller)
                entry.undos += [
                    self._ledger.mark_exit,
                    partial(forget_turn, entry.scope),
                    self._store.poll,
                    partial(self._end_forward, entry),
                    entry.close,
                ]
                turns.append(entry.scope)
                self._inside.add(entry)
                self._fitted.enter(entry)
                if first and self._controller is not None:
                    self._controller.begin()
            entry.activate()
            return self
        except BaseException as error:
            if entry is not None:
                entry.unwind(error)
            raise

    def _scope(self, *, first: bool) -> Scope:
        """Return the scope of an entry's hooks. The `first` entry begins a step."""
        device = device_of(self._model) or torch.device("cpu")
        named = [] if self._model is None else named_modules(self._model)
        if first:
            if self._optimizers is not None:
                self._optimizers.watch()
            if self._controller is not None:
                self._follow(self._controller.next(self._store.place(device), named))
            self._store.start()
            self._fitted.name_modules(named)
        step = None
        if first and self._influence is not None:
            sampled = self._store.observers.samples and may_be_lossy(self._fitted.policy)
            step = self._influence.begin(sampled=sampled)
        tracker = Tracker(
            self._fitted.places,
            self._fitted.top,
            self._store.remember,
            exact="" if self._model is None else "saved outside of the model: part of the loss",
            ended=None if step is None else step.put_out,
        )
        tracker.storages.adopt_model(named)
        return Scope(
            self._store,
            self._fitted.policy,
            tracker,
            self._store.begin(device),
            min_nbytes=self._min_nbytes,
            allow_mutation=self._allow_mutation,
            on_accelerator=device.type != "cpu" or self._model is None,
            readers=None if step is None else step.readers,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry = None
        try:
            entry = entry_to_leave(self, error)
            entry.unwind(error)
            if error is None:
                check_nested(entry)
            else:
                has_budget = self._ledger.budget.limit < inf
                known = () if self._optimizers is None else self._optimizers.known()
                explain(error, self._ledger, self._fitted.policy, self._model, known, has_budget=has_budget)
        except BaseException as failure:
            if not isinstance(failure, Exception):  # an interrupt, which may have come before `unwind` ended
                (entry or entry_to_leave(self, error)).unwind(failure)
            raise

    def _end_forward(self, entry: StoreEntry) -> None:
        """End the forward of an entry, also of one whose beginning was interrupted."""
        with self._lock:
            if entry not in self._inside:
                return
            if self._controller is not None:
                self._controller.end_forward(entry.error)
            if self._influence is not None and entry.scope.readers is not None:
                self._influence.end_forward()
            self._inside.discard(entry)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate `function`: each call runs inside this store's context.

        With "auto", a call that runs out of memory runs once more with a tighter plan, if all that it has changed can
        be restored. A warning says so.
        """

        @wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = call_inside(self, self._controller, self._model, function, args, kwargs)
            return result

        return inside

    def sample_next(self) -> None:
        """Measure errors in the next step, also where `SampleErrors` would not."""
        self._sampler.ask()
        if self._influence is not None:
            self._influence.ask()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the store between two steps, for a checkpoint: `load_state_dict` goes on from it.

        It has text, numbers and lists of text, always under the same keys: ``torch.load(weights_only=True)``, JSON and
        ``torch.distributed.checkpoint`` take it. It has the steps counted, which random bits depend on, and with a
        policy that chooses its plan, its measurements, and its place between two choices. Call it after backward. It
        changes nothing in the training.

        Raises
        ------
        StateError : the store is entered
        CapacityError : `Bits` finds no choice within its budget
        """
        return self._state("state_dict").save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a store with the same arguments: later steps draw the random bits that it would have.

        "auto" takes its plan over without a measurement. It measures, or plans again, where the state was saved before
        the first plan, and where budget, machine or number of ranks have changed: a warning of the logger ``actstore``
        and `plan.history` say so. With `Auto(group=)`, all ranks load; the next step raises where their states differ.

        Raises
        ------
        StateError : the store is entered, or the state is one of another model, policy, `seed` or `min_bytes`
        """
        self._state("load_state_dict").load(state)

    def _state(self, call: str) -> StoreState:
        if self._inside:
            raise StateError(f"{call}() was called inside the store's own context. Leave it first.")
        return StoreState(
            self._model,
            self._chooser or self._given_policy,
            self._fitted.policy,
            self._store.options.seed,
            self._min_nbytes,
            self._store,
            self._sampler,
            self._influence,
            self._controller,
        )

    def close(self) -> None:
        """Return all memory and files, and idle pages of CPU tensors.

        A later backward that needs stored tensors raises StateError.
        """
        if self._inside:
            raise StateError("close() was called inside the store's own context. Leave it first.")
        if self._controller is not None:
            self._controller.close()
        if self._influence is not None:
            self._influence.close()
        self._closed = True
        self._store.close()
        cpu_memory.trim()

    def _fit(self, policy: Policy) -> Fitted:
        return Fitted(policy, self._model, self, self._ledger, self._warned, self._min_nbytes)

    def _follow(self, policy: Policy) -> None:
        """Apply another policy from the next entry on."""
        if policy is not self._fitted.policy:
            self._fitted = self._fit(policy)

    def _switch(self, policy: Policy) -> bool:
        """Apply another policy in a step that was just entered. Returns False where other threads are in it, too."""
        entry = entries()[-1]
        with self._lock:
            if len(self._inside) > 1 or entry.owner is not self or self._model is None:
                return False
            self._fitted.exit(entry)
            self._follow(policy)
            self._fitted.name_modules(named_modules(self._model))
            self._fitted.enter(entry)
            entry.scope.follow(policy, self._fitted.places)
        return True


def _remake(model: Module | None, policy: Any, options: dict[str, Any]) -> ActivationStore:
    return ActivationStore(model, policy, **options)
