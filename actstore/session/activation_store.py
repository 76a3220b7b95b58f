"""ActivationStore: the context manager that users put around a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial, wraps
from math import inf
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.nn import Module

from actstore.autograd.hooks import Scope
from actstore.autograd.tracker import Tracker
from actstore.autograd.unpack import forget_turn, turns
from actstore.base.ledger import Ledger
from actstore.base.units import parse_nbytes
from actstore.devices import cpu_memory
from actstore.errors import CapacityError, ConfigError, StateError
from actstore.model.names import named_modules
from actstore.model.units import device_of
from actstore.policy import Auto, Bits, Decision, Policy, Rules, may_be_lossy
from actstore.recompute.checkpoints import RegionWarnings
from actstore.session.applied_policy import AppliedPolicy
from actstore.session.arguments import check_flag, check_seed, listed, read_chooser, read_model, read_plan, read_policy
from actstore.session.entries import StoreEntry, check_nested, entries, entry_to_leave, refuse_checkpointed_region
from actstore.session.observers import SampleErrors, Verify, read_observers
from actstore.store.store import Store
from actstore.store.tierset import StoreOptions, open_device
from actstore.tiers import Disk, Group, Host, PluginTier, Window
from actstore.tiers.options import read_tiers
from actstore.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.distributed import ProcessGroup

    from actstore.accuracy.bits.payloads import Choice
    from actstore.accuracy.influence.influence import Influence
    from actstore.compiled.backend import GraphBackend
    from actstore.compiled.budget.plan import GraphPlan
    from actstore.plan.plan import Plan
    from actstore.session.controllers import StepPolicy
    from actstore.session.job_report import JobReport
    from actstore.session.process import Optimizers
    from actstore.session.report import Report
    from actstore.session.state import StoreState
    from actstore.tiers.options import TierOptions

P = ParamSpec("P")
R = TypeVar("R")

MIN_NBYTES = 256 * 1024  # smaller tensors are kept: together they are a few per cent, and each costs as much work


class ActivationStore:
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
    KernelUnavailable : a codec needs a package that is not installed

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
    _continues = False  # whether the next entry belongs to the step of the last one
    _enables_grad = False  # whether gradients are turned on inside, as in the closure of an optimizer's step

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
        from actstore.accuracy.sampler import Sampler

        self._model = read_model(model)
        options, window = read_tiers(tiers := listed(tiers))
        observers = read_observers(observe := listed(observe))
        self._given_policy = policy
        self._options = {"tiers": tiers, "min_bytes": min_bytes, "strict": check_flag("strict", strict)}
        self._options |= {"allow_mutation": check_flag("allow_mutation", allow_mutation), "seed": check_seed(seed)}
        self._observe = observe
        self._chooser = chooser = read_chooser(model, policy)
        self._given_plan = read_plan(policy, model)
        self._min_nbytes = parse_nbytes(min_bytes, "min_bytes")
        self._allow_mutation = allow_mutation
        self._lock = Lock()
        self._inside = set[StoreEntry]()  # of all threads
        self._closed = False
        self._warned = RegionWarnings()
        self._ledger = ledger = Ledger()
        if self._given_plan is not None:
            ledger.budget.set(self._given_plan.budget)
        self._applied = self._fit(read_policy("keep" if chooser is not None else policy, model))
        self._sampler = Sampler(ledger, *vars(observers.sample).values())
        self._influence: Influence | None = None
        self._optimizers: Optimizers | None = None
        if model is not None:
            self._watch_model(model)
        self._controller, window = self._control(options, window)
        if observers.trace is not None:
            observers.trace._claim()
        self._store = Store(
            StoreOptions(options, window, strict, seed, observers.trace, observers.verify, self._open_device),
            ledger,
            self._sampler,
            None if self._controller is None else self._controller.gauge,
        )
        rules = self._applied.policy
        needs = (rules.tiers, rules.codecs) if isinstance(rules, Rules) else ()
        self._store.open(device_of(model), *needs)

    def _watch_model(self, model: Module) -> None:
        """Find the model's optimizers, and where payloads may be lossy, their effect on gradients."""
        from actstore.session.process import Optimizers

        self._optimizers = Optimizers(model)
        if self._chooser is not None or may_be_lossy(self._applied.policy):
            from actstore.accuracy.influence.influence import Influence

            self._influence = Influence(model, self._ledger, self._sampler.relative)

    def _control(self, options: dict[str, TierOptions], window: Window) -> tuple[StepPolicy | None, Window]:
        """Return the controller of a policy that chooses, and the window, which a plan may set."""
        if self._chooser is None and self._given_plan is None:
            return None, window
        from actstore.session.controllers import controller_of, window_of

        controller = controller_of(
            self._chooser, options, self._model, self._ledger, self._influence, self._sampler.ask, self._switch,
            sets_window=window.nbytes is None,
        )  # fmt: skip
        return controller, window_of(window, self._given_plan, self._chooser, self._ledger.budget.limit)

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
                evaluates = not (torch.is_grad_enabled() or self._enables_grad) and self._store.steps > 0
                first = not self._inside and not self._continues and not evaluates
                entry = StoreEntry(self, self._scope(first=first), self._controller, first=first)
                entry.undos += [
                    *([] if evaluates else [self._ledger.mark_exit]),  # the report stays that of training
                    partial(forget_turn, entry.scope),
                    self._store.poll,
                    partial(self._end_forward, entry),
                    entry.close,
                ]
                turns.append(entry.scope)
                self._inside.add(entry)
                self._applied.enter(entry)
                if first and self._controller is not None:
                    self._controller.begin()
                    entry.scope.note_savers()
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
            self._applied.name_modules(named)
        step = None
        if first and self._influence is not None:
            sampled = self._store.observers.samples and may_be_lossy(self._applied.policy)
            step = self._influence.begin(sampled=sampled)
        tracker = Tracker(
            self._applied.places,
            self._applied.top,
            self._store.remember,
            exact="" if self._model is None else "saved outside of the model: part of the loss",
            ended=None if step is None else step.put_out,
        )
        tracker.storages.adopt_model(named)
        return Scope(
            self._store,
            self._applied.policy,
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
            elif isinstance(error, CapacityError | MemoryError | RuntimeError):
                self._explain(error)
        except BaseException as failure:
            if not isinstance(failure, Exception):  # an interrupt, which may have come before `unwind` ended
                (entry or entry_to_leave(self, error)).unwind(failure)
            raise

    def _explain(self, error: BaseException) -> None:
        """Add a note to an error about memory."""
        with suppress(Exception):  # memory may be too short for the import, too
            from actstore.session.out_of_memory import explain

            known = () if self._optimizers is None else self._optimizers.known()
            has_budget = self._ledger.budget.limit < inf
            explain(error, self._ledger, self._applied.policy, self._model, known, has_budget=has_budget)

    def _end_forward(self, entry: StoreEntry) -> None:
        """End the forward of an entry, also of one whose beginning was interrupted."""
        with self._lock:
            if entry not in self._inside:
                return
            if self._controller is not None:
                self._controller.end_forward(entry.error)
            if self._influence is not None and entry.scope.readers is not None:
                self._influence.end_forward()
            self._enables_grad |= not torch.is_grad_enabled() and entry.has_acted
            self._inside.discard(entry)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate `function`: each call runs inside this store's context.

        With "auto", a call that runs out of memory runs once more with a tighter plan, if all that it has changed can
        be restored. A warning says so.
        """

        @wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._controller is None:
                with self:
                    return function(*args, **kwargs)
            from actstore.session.controllers import call_inside

            result: R = call_inside(self, self._controller, self._model, function, args, kwargs)
            return result

        return inside

    @property
    def model(self) -> Module | None:
        """Model of the store; None for none."""
        return self._model

    @property
    def policy(self) -> Policy:
        """Policy as a value."""
        return self._applied.policy

    def explain(self) -> str:
        """Return a text that says what each rule covers in the model, or what a plan or `Bits` has decided.

        `@blocks` and other aliases stand there as the names that they were found to mean.
        """
        from actstore.policy.explain import explain

        return str(self.plan or self.choice or explain(self._chooser or self._applied.policy, self._model))

    @property
    def plan(self) -> Plan | None:
        """Plan that `Auto` has found, or that was given; None while steps are measured, and for a compiled model."""
        return self._given_plan if self._controller is None else self._controller.plan

    @property
    def graph_plan(self) -> GraphPlan | None:
        """Plan of the graphs of a model that is compiled under `Auto`; None before its first step."""
        return None if self._controller is None else self._controller.graph_plan

    @property
    def choice(self) -> Choice | None:
        """Codecs that `Bits` has chosen; None while steps are measured."""
        return None if self._controller is None else self._controller.choice

    def report(self) -> Report:
        """Return the figures of the last forward, per site and in all, and the errors of the last sampled step.

        Raises
        ------
        AccuracyError : a site lost more than ``SampleErrors(fail=)``, and no call has raised this yet
        """
        from actstore.session.causes import request_of
        from actstore.session.process import ProcessMemory
        from actstore.session.report import Report

        self._store.poll()
        gradients = None if self._influence is None else self._influence.read()
        circumstances, errors = self._store.circumstances(self._min_nbytes), self._sampler.errors()
        result = self.plan or self.graph_plan or self.choice
        request = request_of(self._applied, self._controller, result, self._model)
        process = None
        if circumstances.on_host:
            optimizers = [] if self._optimizers is None else self._optimizers.find()
            process = ProcessMemory.now(self._model, self._ledger.held, optimizers)
        return Report._of(self._ledger, circumstances, errors, gradients, request, process)

    def job_report(self, group: ProcessGroup | None = None) -> JobReport | None:
        """Return the figures of the last forward of all ranks, on the first rank of the group; None on the other ranks.

        A collective: each rank of the group calls it on its store, between two steps.

        Parameters
        ----------
        group : the process group; None for all ranks of the job

        Raises
        ------
        StateError : this process has no process group
        """
        from actstore.session.job_report import gather

        self._store.poll()
        return gather(self._ledger, self._applied.policy, self.plan, group)

    def rules_by_size(
        self, larger_than: int | str, decision: Decision | str = "recompute", among: str = "@blocks"
    ) -> Rules:
        """Return rules for the modules that saved more than `larger_than` in the last forward, and `keep` for the rest.

        What a module saved includes what the modules inside of it saved, and does not depend on the policy of that
        forward: it is `Report.saved_bytes`, where each storage counts once, for the module that saved it first.

        Parameters
        ----------
        larger_than : bytes, an int or text such as ``"64MiB"``
        decision : what becomes of the larger modules, as a value or text
        among : pattern of the modules to choose from; of modules inside each other that it matches, the outermost

        Raises
        ------
        StateError : no module has saved a tensor yet
        PolicyError : `among` matches no module, names a tag, or the store has no model
        ConfigError : `larger_than` or `decision` does not parse
        """
        from actstore.session.by_size import rules_by_size

        return rules_by_size(self._ledger, self._model, larger_than, decision, among)

    @property
    def held_bytes(self) -> int:
        """Bytes of activations that are held on the compute device now."""
        return self._ledger.held

    def held_by_module(self) -> dict[str, int]:
        """Return `held_bytes` by the name of the module that saved them; a region's memory while it runs again is not
        among them."""
        return self._ledger.held_by_module()

    def plot(self) -> Figure:
        """Draw where the bytes of each module waited at the end of the last forward: `report().plot()`."""
        return self.report().plot()

    @property
    def trace(self) -> Trace:
        """Trace of the events so far.

        Raises
        ------
        StateError : the store was made without Trace()
        """
        trace = self._store.events()
        if trace is None:
            raise StateError("the store has no trace. Make it with ActivationStore(..., observe=[Trace()]).")
        return trace

    def compile(self, model: Module | None = None, **options: Any) -> None:
        """Compile the model, or a module of it, with the policy in the graphs, in place as `Module.compile` does.

        What a graph saves for backward leaves forward as payloads, and is decoded right before backward reads it. Enter
        the store around forward as always: the report then tells of the tensors inside of the compiled regions.

        Parameters
        ----------
        model : a module of the store's model; None for the store's model
        options : as for `torch.compile`: fullgraph, dynamic, mode, options, and backend, which `backend` takes as
            `inner`

        Raises
        ------
        ConfigError : the module is not a part of the store's model, the store has none, or the policy is one that
            chooses
        """
        from actstore.session import compiling

        part = self._model if model is None else model
        if part is None:
            raise ConfigError("model=None: the store has no model. Give the module to compile.")
        inner = compiling.read_inner(options)
        backend = self._backend(part, inner)
        compiled = compiling.compile_part(part, backend, options)
        if backend.budget is None:
            part._compiled_call_impl = compiled
            return
        assert isinstance(self._chooser, Auto)
        compiling.run_graphs(
            backend.budget,
            (part, compiled),
            self._chooser,
            self._options["tiers"],
            self._store,
            (self._ledger, self._sampler, self._influence),
            self._controller,
        )

    def backend(self, inner: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
        """Return a back end for ``torch.compile(model, backend=)``, with the policy in the graphs.

        It is for the whole model, or for a function around it. `compile` also takes a part of the model.

        Parameters
        ----------
        inner : "inductor"; "aot_eager", which runs the graphs as they are; or a function that compiles a graph of ATen
            operators

        Raises
        ------
        ConfigError : `inner` is unknown, or the policy is one that chooses
        """
        backend = self._backend(self._model, inner)
        if backend.budget is not None:
            raise ConfigError(
                f"policy={self._given_policy}: a budget is for a model, and a back end may compile more. Use "
                "store.compile()."
            )
        return backend

    def _backend(self, part: Module | None, inner: str | Callable[..., Any]) -> GraphBackend:
        from actstore.compiled.backend import GraphBackend
        from actstore.session.compiling import graph_rules

        samples = any(isinstance(each, SampleErrors) and each.every for each in self._observe)
        rules = graph_rules(self._applied.policy, self._chooser, self._model, part, self._min_nbytes, samples=samples)
        backend = GraphBackend(rules, inner)
        if self._inside:
            raise StateError("a module was compiled inside of the store's context. Compile it before the first step.")
        self._applied.leave_to_graphs(rules.target)
        return backend

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
        from actstore.session.state import StoreState

        return StoreState(
            self._model,
            self._chooser or self._given_policy,
            self._applied.policy,
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

    def _fit(self, policy: Policy) -> AppliedPolicy:
        return AppliedPolicy(policy, self._model, self, self._ledger, self._warned, self._min_nbytes)

    def _follow(self, policy: Policy) -> None:
        """Apply another policy from the next entry on."""
        if policy is not self._applied.policy:
            self._applied = self._fit(policy)

    def _switch(self, policy: Policy) -> bool:
        """Apply another policy in a step that was just entered. Returns False where other threads are in it, too."""
        entry = entries()[-1]
        with self._lock:
            if len(self._inside) > 1 or entry.owner is not self or self._model is None:
                return False
            self._applied.exit(entry)
            self._follow(policy)
            self._applied.name_modules(named_modules(self._model))
            self._applied.enter(entry)
            entry.scope.follow(policy, self._applied.places)
        return True


def _remake(model: Module | None, policy: Any, options: dict[str, Any]) -> ActivationStore:
    return ActivationStore(model, policy, **options)
