"""ActivationStore: the context manager that users put around a forward pass."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from os import PathLike
from threading import Lock, local
from types import TracebackType
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._autograd import _pop_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from actstore.accuracy import Sampler
from actstore.accuracy.bits.chooser import Chooser
from actstore.accuracy.bits.payloads import Choice
from actstore.accuracy.influence.influence import Influence
from actstore.accuracy.influence.pairs import Pairs
from actstore.auto.attempt import Attempt
from actstore.auto.controller import Auto, check_plan
from actstore.autograd import compiled
from actstore.autograd import tracker as modules
from actstore.autograd.census import Census
from actstore.autograd.compiled import NamedCall
from actstore.autograd.hooks import Scope, turns, unpack
from actstore.autograd.tracker import Place, Tracker
from actstore.base.checkpoints import innermost_pack
from actstore.base.ledger import Ledger
from actstore.base.units import parse_budget, parse_nbytes
from actstore.devices import cpu_memory
from actstore.errors import ConfigError, PolicyError, StateError
from actstore.model.blocks import repeated_blocks
from actstore.model.names import named_modules
from actstore.model.units import device_of
from actstore.plan.plan import Plan
from actstore.plan.wish import Wish
from actstore.policy import Decision, Keep, Policy, Recompute, Rules
from actstore.recompute import counting
from actstore.recompute.checkpoints import DoubleCheckpoints, end_left
from actstore.recompute.replay import Calls
from actstore.recompute.wrapped import Wrapped
from actstore.session.arguments import (
    may_be_lossy,
    names_tags,
    read_count,
    read_error,
    read_policy,
    read_when_full,
    read_window,
    read_wish,
    recomputes,
    tiers_of,
    window_under,
)
from actstore.session.causes import Request
from actstore.session.out_of_memory import explain
from actstore.session.process import ProcessMemory
from actstore.session.report import Report
from actstore.store.store import Store
from actstore.store.tierset import StoreOptions
from actstore.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
R = TypeVar("R")

MIN_NBYTES = 256 * 1024  # smaller tensors are kept: together they are a few per cent, and each costs as much work

SAMPLE_ERRORS = 200  # steps; a step that is sampled takes about twice as long: half a per cent of the time

GROUPED_NBYTES = 2**20  # where everything is kept, smaller tensors are accounted for in groups

_thread = local()  # .entries: those of all stores on this thread, the innermost last


class ActivationStore:
    """Decides for each activation of a forward pass where it waits for backward.

    Use it as a context manager around forward, again and again, or as a decorator of a function. Backward may run
    inside or outside of the context. Nothing in the model changes.

    Parameters
    ----------
    model : Module, optional; names in `policy` are the names of its modules. Without a model one decision holds for
        everything.
    policy : text such as ``"blocks.*.attn : int8 @ host"``, or ``"int8"`` for everything; or Rules, a Decision, or any
        function ``(Site, Spec) -> Decision``; or "auto" or "bits", or a Plan that "auto" has made. In text and Rules
        ``@blocks``, ``@attention``, ``@mlp`` and ``@norm`` stand for these parts of the model, whatever their names
    budget : with "auto", most bytes of activations on the compute device (`peak_held_bytes`), as an int or text such as
        ``"20GiB"``. The first steps measure what each decision costs, the next ones run the fastest that fits; all have
        exact gradients, without `max_noise`. Host memory is used as far as `host_budget` goes, a disk only where
        `disk_budget` is given. With "bits", most bytes that are held when forward ends: codecs are chosen that disturb
        the gradients least
    max_noise : the variance that payloads may add to the gradients of the weights, as a fraction of their variance from
        batch to batch; 0.1 costs what a batch that is a tenth smaller costs. With "bits", codecs with the fewest bytes
        are chosen; the first two steps measure with 8 bits, and later pairs of steps with what was chosen. With "auto",
        codecs that lose something are among the decisions
    min_bytes : smaller tensors are kept as they are; 0 sends all through
    host_budget, disk_budget : most bytes in host memory and on disk, as an int or text such as ``"20GiB"``; with
        ``"160GiB/node"`` the processes that torchrun started on this machine share them equally
    disk_path : an existing folder for the disk tier; the system's temporary folder by default
    gpu_direct : whether payloads move between GPU memory and disk without host memory in between (GPUDirect Storage).
        Needs an NVIDIA GPU and the package kvikio: the extra `gds12` or `gds13`. kvikio waits for CUDA's default stream
        before each transfer: compute on a stream of your own, else disk and GPU take turns
    allow_mutation : whether a saved tensor may be changed in place before backward. Where a copy was stored, backward
        then sees the value at the time of saving; where the tensor was kept it is an error all the same.
    window : most bytes that are on their way to one tier at once, and most that are fetched ahead in backward; on the
        compute device they exist until they have left. From the second step on a third of what moves is the bound where
        that is less (4 MiB at least), unless there is a budget. 256 MiB by default, 32 MiB on a CPU
    when_full : what a tensor does when the window is full. "wait": the compute stream waits for the oldest copy (the
        host waits too where the tier is a disk); "keep": it stays on the device, encoded; "spill": it goes to the next
        tier of its ladder, and waits where there is none
    strict : whether a full tier is an error; by default what does not fit is kept
    sample_errors : in every so many-th step, from the first that has lossy payloads on, each of them is decoded at once
        and compared with its tensor, for the errors in `report`, `trace` and loggers; 0 for never. It takes the memory
        of that tensor for the moment, and until the next step ends 1,024 elements of each weight's gradient at most,
        and changes nothing else. Steps that "auto" measures are left out
    warn_error : the relative error (0.05 is 5 %) of a site above which a RuntimeWarning is given, once for each site
    fail_error : that above which AccuracyError is raised: by the next entry after the step that was sampled, or by
        `report` or `close` where that comes first, once. The entry then waits until the device has come to the last
        payload that was sampled; otherwise nobody waits, and warnings come with an entry that finds the figures there
    trace : whether to write down what happens when, for `trace`
    verify : check every payload against a checksum that was taken when it was encoded, and fill memory with NaN before
        it is used again. Slow, and the host waits for the device: for tests and for the search for a fault
    seed : of the random bits of `round=stochastic` and `round=dither`; the same seed and program give the same bytes.
        torch's generators are not touched

    Raises
    ------
    PolicyError, ChainError, UnknownCodecError : the policy does not parse, or does not fit the model
    ConfigError : a budget does not parse, the disk tier's folder cannot be written, `gpu_direct` cannot work, the model
        is on several devices, `sample_errors` or a threshold is no such number

    Warns
    -----
    RuntimeWarning : in a step that was sampled, a site lost elements (`ErrorFigures.lost`), its values shrank or grew
        by more than rounding explains (`ErrorFigures.shrunk`), or its error is above `warn_error`

    Notes
    -----
    Thread-safe: several threads may enter one store; each follows its own forward. A lossless policy (keep, recompute,
    raw) gives gradients equal bit for bit to those without a store.
    """

    def __init__(
        self,
        model: Module | None = None,
        policy: str | Rules | Decision | Policy | Plan = "keep",
        *,
        budget: int | str | None = None,
        max_noise: float | None = None,
        min_bytes: int | str = MIN_NBYTES,
        host_budget: int | str | None = None,
        disk_budget: int | str | None = None,
        disk_path: str | PathLike[str] | None = None,
        gpu_direct: bool = False,
        allow_mutation: bool = False,
        window: int | str | None = None,
        when_full: Literal["wait", "keep", "spill"] = "wait",
        strict: bool = False,
        seed: int = 0,
        sample_errors: int = SAMPLE_ERRORS,
        warn_error: float | None = None,
        fail_error: float | None = None,
        trace: bool = False,
        verify: bool = False,
    ) -> None:
        if model is not None and not isinstance(model, Module):
            raise ConfigError(
                f"model={model!r} is not a torch.nn.Module; give the model first and the policy second, or "
                "policy= alone for code without a model"
            )
        self._model = model
        wish = read_wish(model, policy, budget, max_noise, host_budget, disk_budget)
        self._given_plan = policy if isinstance(policy, Plan) else None
        if self._given_plan is not None:
            check_plan(self._given_plan, model)
        self._policy = read_policy("keep" if wish else policy, model)
        self._min_nbytes = parse_nbytes(min_bytes, "min_bytes")
        self._allow_mutation = allow_mutation
        ledger = Ledger()
        self._sampler = Sampler(
            ledger,
            read_count(sample_errors, "sample_errors"),
            read_error(warn_error, "warn_error", sample_errors),
            read_error(fail_error, "fail_error", sample_errors),
        )
        self._store = Store(
            StoreOptions(
                host_budget_nbytes=None if host_budget is None else parse_budget(host_budget, "host_budget"),
                disk_budget_nbytes=None if disk_budget is None else parse_budget(disk_budget, "disk_budget"),
                disk_path=disk_path,
                gpu_direct=gpu_direct,
                window_nbytes=window_under(wish, self._given_plan) if window is None else read_window(window),
                when_full=read_when_full(when_full),
                strict=strict,
                seed=seed,
                trace=trace,
                verify=verify,
            ),
            ledger,
            self._sampler,
        )
        self._influence = Influence(model, ledger, self._sampler.relative) if model is not None else None
        self._lock = Lock()
        self._inside = set[_Entry]()  # those of all threads
        self._double = DoubleCheckpoints()
        self._wrapped = self._fit_model()
        self._places: dict[Module, Place] = {}
        self._compiled: list[NamedCall] = []
        self._top = self._place("")
        self._auto: Auto | Chooser | None = None  # decides anew for each step
        if model is not None and self._influence is not None:
            pairs = Pairs(self._influence, ledger, self._sampler.ask)
            if isinstance(wish, Wish):
                self._auto = Auto(model, ledger, wish, pairs, self._switch, sets_window=window is None)
                self._store.gauge = self._auto.profiler
            elif wish is not None:
                self._auto = Chooser(ledger, wish, pairs)
        if self._given_plan is not None:
            ledger.limit = self._given_plan.budget
        device = device_of(model)
        if device is not None:  # what its first use waits for is waited for here
            self._store.open(device, "device")
        if device is not None or not gpu_direct:
            for tier in sorted(tiers_of(self._policy) - {"device", "host"}):
                self._store.open(device or torch.device("cpu"), tier)

    # -- the context --------------------------------------------------------------------------------------------------

    def __enter__(self) -> ActivationStore:
        _refuse_checkpointed_region()
        entry = None
        try:
            with self._lock:
                first = not self._inside
                entry = _Entry(self, self._scope(first=first))
                self._inside.add(entry)
                if first:
                    compiled.wrap(self._places, self, self._compiled)
                for wrapped in self._wrapped:
                    wrapped.enter(entry)
                if first and self._auto is not None:
                    self._auto.begin()
            modules.start(entry.scope.tracker)
            _entries().append(entry)
            turns.append(entry.scope)
            saved_tensors_hooks(entry.pack, unpack).__enter__()
            return self
        except BaseException as error:
            if entry is not None:
                self._leave(entry, error)
            raise

    def _scope(self, *, first: bool) -> Scope:
        """What the hooks of an entry know; of the `first` one, the step begins."""
        device = device_of(self._model) or torch.device("cpu")
        named = [] if self._model is None else named_modules(self._model)
        if first:
            if self._auto is not None:
                self._follow(self._auto.next(self._store.place(device), named))
            self._store.start()
            self._name_modules(named)
        census = Census()
        parameters = set[int]()
        outside = "" if self._model is None else "saved outside of the model: part of the loss"
        tracker = Tracker(self._places, self._top, census, parameters, outside)
        for _, module in named:
            for weight in chain(module._parameters.values(), module._buffers.values()):
                if weight is not None:
                    tracker.adopt(weight)
        scope = Scope(
            self._store,
            self._policy,
            tracker,
            census,
            parameters,
            self._store.begin(device),
            min_nbytes=self._min_nbytes,
            allow_mutation=self._allow_mutation,
            on_accelerator=device.type != "cpu" or self._model is None,
        )
        if first and self._influence is not None:
            step = self._influence.begin(sampled=self._store.sampling is not None and may_be_lossy(self._policy))
            if step is not None:
                scope.readers, tracker.ended = step.readers, step.put_out
        return scope

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry = None
        try:
            entry = self._innermost(error)
            self._leave(entry, error)
            if error is not None:
                has_budget = self._given_plan is not None or isinstance(self._auto, Auto)
                explain(error, self._store.ledger, self._policy, self._model, has_budget=has_budget)
        except BaseException as failure:
            if not isinstance(failure, Exception):  # an interrupt fell into it
                self._leave(entry or self._innermost(error), failure)
            raise

    def _innermost(self, error: BaseException | None) -> _Entry:
        """The innermost entry of this thread, which is to be of this store."""
        entries = _entries()
        if not entries or entries[-1].session is not self:
            raise StateError(
                "a store was left on a thread where it is not the innermost one that was entered; "
                "leave stores in the reverse order, each on the thread that entered it",
                expected=entries[-1].session if entries else None,
            )
        entry = entries[-1]
        if error is not None:
            end_left(error, entry.pack)
        pack = innermost_pack()
        if pack is not entry.pack:
            raise StateError(
                "other saved-tensor hooks were entered inside this store's context and not left before it; "
                "leave contexts in the reverse order",
                hooks=pack,
            )
        return entry

    def _leave(self, entry: _Entry, error: BaseException | None) -> None:
        """Undo an entry, or what there is of it where entering or leaving was interrupted."""
        entries = _entries()
        if entries and entries[-1] is entry:
            entries.pop()
        if innermost_pack() is entry.pack:
            _pop_saved_tensors_default_hooks()
        modules.stop(entry.scope.tracker, entry.before)
        try:
            entry.scope.close(failed=error is not None)
        finally:
            with self._lock:
                if entry in self._inside:
                    if len(self._inside) == 1:
                        compiled.unwrap(self._compiled, self)
                    for wrapped in self._wrapped:
                        wrapped.exit(entry)
                    if self._auto is not None:
                        self._auto.end_forward(error)
                    if self._influence is not None and entry.scope.readers is not None:
                        self._influence.end_forward()
                    self._inside.discard(entry)
            self._store.poll()
            with suppress(ValueError):  # backward has begun
                turns.remove(entry.scope)
            self._store.ledger.mark_exit()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate `function`: each call runs inside this store's context.

        With "auto", a call that runs out of memory is run once more with a tighter plan, if it has changed nothing that
        cannot be put back; a warning tells.
        """

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            auto, model = self._auto, self._model
            if not isinstance(auto, Auto) or model is None:
                with self:
                    return function(*args, **kwargs)
            attempt = Attempt(model, (args, kwargs))
            try:
                with self:
                    return function(*args, **kwargs)
            except BaseException as error:
                if not auto.tightened(error):
                    raise
                why = attempt.undo()
                if why:
                    error.add_note(f"actstore: the step was not run again, because {why}")
                    raise
            with self:
                return function(*args, **kwargs)

        return inside

    # -- what users ask -----------------------------------------------------------------------------------------------

    @property
    def model(self) -> Module | None:
        """The model that the store was made for."""
        return self._model

    @property
    def policy(self) -> Policy:
        """The policy as a value."""
        return self._policy

    @property
    def plan(self) -> Plan | None:
        """The plan that runs; None for other policies, and while "auto" measures."""
        return self._auto.plan if isinstance(self._auto, Auto) else self._given_plan

    @property
    def choice(self) -> Choice | None:
        """What "bits" has chosen; None for other policies, and until the first steps are over."""
        return self._auto.choice if isinstance(self._auto, Chooser) else None

    def report(self) -> Report:
        """What the last forward saved, stored and held, per site and in all; what was lost in the last sampled step.

        Raises
        ------
        AccuracyError : a site lost more than `fail_error`, and nobody was told yet
        """
        store = self._store
        store.poll()
        gradients = None if self._influence is None else self._influence.read()
        circumstances, errors = store.circumstances(self._min_nbytes), self._sampler.errors()
        process = ProcessMemory.now(self._model, store.ledger.held) if circumstances.on_host else None
        return Report.of(store.ledger, circumstances, errors, gradients, self._request(), process)

    def _request(self) -> Request:
        """Return the choices that advice must respect."""
        hidden = tuple(place.name for place in self._places.values() if place.hidden)
        plan = self.plan
        if isinstance(self._auto, Chooser):
            return Request(self._policy, "bits", measuring=self.choice is None)
        if plan is not None or self._auto is not None:
            budget = 0 if plan is None else int(plan.budget)
            chooser = "plan" if self._auto is None else "auto"
            return Request(self._policy, chooser, measuring=plan is None, budget=budget, hidden=hidden)
        return Request(self._policy, "" if isinstance(self._policy, Rules) else "function", hidden=hidden)

    def sample_next(self) -> None:
        """Measure errors in the next step, whatever `sample_errors` says."""
        self._sampler.ask()
        if self._influence is not None:
            self._influence.ask()

    def plot(self) -> Figure:
        """A picture of where the bytes of each module waited at the end of the last forward: `report().plot()`."""
        return self.report().plot()

    @property
    def trace(self) -> Trace:
        """What happened when, so far.

        Raises
        ------
        StateError : the store was made without trace=True
        """
        trace = self._store.events()
        if trace is None:
            raise StateError(
                "there is no trace: make the store with ActivationStore(..., trace=True), and run a forward pass"
            )
        return trace

    def close(self) -> None:
        """Return all memory and files, and idle pages of CPU tensors.

        A backward that still needs stored tensors raises StateError afterwards.
        """
        if self._inside:
            raise StateError("close() was called inside the store's own context; leave it first")
        if self._auto is not None:
            self._auto.close()
        if self._influence is not None:
            self._influence.close()
        self._store.close()
        cpu_memory.trim()

    # -- fitting a model ----------------------------------------------------------------------------------------------

    def _fit_model(self) -> list[Wrapped]:
        model, policy = self._model, self._policy
        if model is not None:
            _refuse_mixed_devices(model)
        if not isinstance(policy, Rules):
            return []
        if model is None:
            named_rules = [pattern for pattern, _ in policy.rules if not pattern.startswith("*/")]
            if named_rules or recomputes(policy):
                raise PolicyError(
                    f"the policy names modules or recomputes them, but no model was given: {str(policy)!r}; "
                    "write ActivationStore(model, policy)"
                )
            return []
        named = dict(named_modules(model))
        policy.check(named)
        roots = policy.recompute_roots(list(named), repeated_blocks(model) if recomputes(policy) else [])
        alike = Counter(roots.values())
        return [
            Wrapped(name, named[name], decision, self._entry_here, self._double, alike[decision])
            for name, decision in roots.items()
        ]

    def _follow(self, policy: Policy) -> None:
        """Run another policy from the next entry on."""
        if policy is not self._policy:
            self._policy = policy
            self._wrapped = self._fit_model()
            self._places = {}
            self._top = self._place("")

    def _switch(self, policy: Policy) -> bool:
        """Run another policy in a step that was just entered; False where other threads are in it, too."""
        entry = _entries()[-1]
        with self._lock:
            if len(self._inside) > 1 or entry.session is not self or self._model is None:
                return False
            for wrapped in self._wrapped:
                wrapped.exit(entry)
            self._follow(policy)
            self._name_modules(named_modules(self._model))
            for wrapped in self._wrapped:
                wrapped.enter(entry)
            entry.scope.follow(policy, self._places)
        return True

    def _name_modules(self, named: list[tuple[str, Module]]) -> None:
        """Look at the model's modules again: users replace them between steps."""
        by_name = {place.name: place for place in self._places.values()}
        places = {}
        for name, module in named:
            place = self._places.get(module)
            if place is None or place.name != name:
                place = by_name.get(name)
                if place is None:
                    place = by_name[name] = self._place(name)
            places[module] = place
        self._places = places

    def _place(self, name: str) -> Place:
        decision = self._policy.decide(name) if isinstance(self._policy, Rules) else None
        keep_below = self._min_nbytes
        if isinstance(decision, Keep) and not names_tags(self._policy):
            keep_below = max(keep_below, GROUPED_NBYTES)
        watched = isinstance(self._policy, Rules) and (
            self._policy.pattern_of(name) != "*" or isinstance(decision, Recompute)
        )
        return Place(name, self._store.ledger, decision, keep_below, watched=watched)

    def _entry_here(self) -> _Entry | None:
        """The entry of this store on this thread, if it is the innermost."""
        entries = _entries()
        return entries[-1] if entries and entries[-1].session is self else None


class _Entry:
    """One entry of one store on one thread."""

    __slots__ = ("before", "calls", "pack", "scope", "session")

    def __init__(self, session: ActivationStore, scope: Scope) -> None:
        self.session = session
        self.scope = scope
        self.calls = Calls()
        self.pack = scope.entry_hook() if session._auto is None else session._auto.watching(scope.entry_hook())
        self.before = modules.current()


def tag(tensor: Tensor, name: str) -> Tensor:
    """Name a tensor, so that a rule can address it: ``"blocks.*/qkv : int8 @ host"``. Returns the tensor itself.

    The name holds for all views of the tensor's storage that operators save afterwards, in the innermost active store;
    without one this does nothing. An operator that saves its own output (exp, relu, softmax, attention) has done so
    before its output can be named.
    """
    if not name or any(c.isspace() or c in "/:;#@>()[]*?" for c in name):
        raise ConfigError(f"tag name {name!r} is not a word; use letters, digits, '_', '-' and '.'")
    entries = _entries()
    if entries:
        entries[-1].scope.tag(tensor, name)
    return tensor


def is_active() -> bool:
    """Whether some store is entered on this thread."""
    return bool(_entries())


@contextmanager
def one_lossy_site(store: ActivationStore, site: str) -> Iterator[None]:
    """Meanwhile the payloads of this site alone are lossy, and all others of the store exact."""
    store._store.alone = site
    try:
        yield
    finally:
        store._store.alone = None


def _entries() -> list[_Entry]:
    entries: list[_Entry] | None = getattr(_thread, "entries", None)
    if entries is None:
        entries = _thread.entries = []
    return entries


def _refuse_mixed_devices(model: Module) -> None:
    first: tuple[str, torch.device] | None = None
    for name, tensor in model.named_parameters():
        if first is None:
            first = (name, tensor.device)
        elif tensor.device != first[1]:
            raise ConfigError(
                f"the model lies on several devices: {first[0]} on {first[1]}, {name} on {tensor.device}; "
                "move it to one (model.to(device)), or make one store for the part on each device",
                devices=(first[1], tensor.device),
            )


def _refuse_checkpointed_region() -> None:
    """A store inside a checkpointed region would save everything that the checkpoint leaves out."""
    pack = innermost_pack()
    inside = getattr(pack, "__module__", "") in ("torch.utils.checkpoint", counting.__name__)
    if inside or torch._C._current_graph_task_id() != -1:
        where = "a checkpointed region" if inside else "a running backward (a checkpoint recomputes there)"
        raise StateError(
            f"a store was entered inside {where}: it would save what the checkpoint is to recompute. Enter the store "
            "outside, around the checkpointed forward; it then stores the inputs of the regions."
        )
