"""Dry steps of one model: plain, and with a store for each policy; and profiles of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from math import inf
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from actstore.auto.probes import MAX_MEASURED_STEPS, Probes
from actstore.auto.profiler import Profiler
from actstore.autograd.hooks import Scope
from actstore.base.ledger import Account
from actstore.base.storage import SharedStorage
from actstore.base.ticket import Done, Ticket
from actstore.codecs import Codec
from actstore.codecs.base import Bound
from actstore.devices import Cpu
from actstore.devices.cpu_memory import unreserved
from actstore.errors import ConfigError, PolicyError, StateError
from actstore.inspection.fit.dry import DryMode
from actstore.inspection.fit.memory import Label, LiveMemory
from actstore.inspection.fit.result import FitRow
from actstore.inspection.fit.shards import ShardedUnits, split_weights
from actstore.inspection.fit.store import DryStore
from actstore.inspection.fit.work import DryTimes, Work
from actstore.model.blocks import repeated_blocks
from actstore.plan.decisions import rules_of
from actstore.plan.hardware import Hardware
from actstore.plan.plan import Plan
from actstore.plan.profile import Profile
from actstore.plan.solver.chain import Links
from actstore.plan.values import Grants
from actstore.policy.pattern import ancestry
from actstore.recompute.tiles import has_values
from actstore.rerun.optimizers import live_optimizers
from actstore.rerun.step import leaves_of, run_backward, takes_store
from actstore.rerun.target import read_target
from actstore.session.entries import StoreEntry
from actstore.store.observers import Gauge

EVERYTHING = Grants(0, None, 0, 0.0)  # limits that leave no decision out, but for those on a disk and lossy ones


class ProfiledStore(DryStore):
    """The store of dry steps under the decisions that "auto" tries, which measures them as "auto" does.

    Parameters
    ----------
    links : rates of the device's links
    tiles : whether decisions with a part in tiles are among them
    """

    def __init__(
        self, model: Module, memory: LiveMemory, work: Work, links: Links, *, tiles: bool = False, **options: Any
    ) -> None:
        super().__init__(model, "keep", memory, work, on_host=links.on_host, **options)
        self._on_host = links.on_host
        self._clock = WorkClock(work)
        self._profiler = Profiler(model, self._ledger)
        self._probes = Probes(self._profiler, model, replace(EVERYTHING, tiles=tiles))
        self._probes.use(links)
        self._decisions: dict[str, str] = {}
        codecs = self._store.observers.gauge
        assert codecs is not None
        self._store.observers.measure(_Measured(codecs, self._profiler))

    def profile(self, train: Callable[[], object]) -> Profile:
        """Run steps until each decision has been tried on each kind of unit, and return their figures.

        Raises
        ------
        ConfigError : no step enters the store and runs backward through the model
        """
        for _ in range(MAX_MEASURED_STEPS):
            if not self._take():
                break
            train()
        if not self._probes.steps:
            raise ConfigError(
                'policy="auto": needs a step with a backward through the model. Return the model that the step calls.'
            )
        return self._probes.profile(torch.device("cpu"))

    def close(self) -> None:
        self._profiler.cancel()
        self._probes.close()
        super().close()

    def _take(self) -> bool:
        """Take the figures of the last step, and choose the next decisions; return False where no try is left."""
        sample = self._profiler.finish()
        if sample is not None and sample.backward:
            self._probes.add(sample)
        decisions = self._probes.untried(on_host=self._on_host, samples=1, room=inf)
        self._decisions = decisions or {}
        return decisions is not None

    def _scope(self, *, first: bool) -> Scope:
        if first:
            if self._profiler.measures:  # the second entry of a step
                self._take()
            self._follow(rules_of(self._decisions))
        scope = super()._scope(first=first)
        if first:
            self._profiler.begin(self._clock, self._decisions)
            scope.note_savers()
        return scope

    def _end_forward(self, entry: StoreEntry) -> None:
        self._profiler.end_forward()
        super()._end_forward(entry)


class WorkClock(Cpu):
    """A CPU whose time is that of the counted work."""

    def __init__(self, work: Work) -> None:
        super().__init__(torch.device("cpu"))
        self._work = work

    def mark(self, stream: Any) -> Ticket:
        now = round(self._work.compute_ms * 1e6)
        return Done((now, now))


class _Measured:
    """Gauge that wraps another gauge, and measures its codecs."""

    def __init__(self, codecs: Gauge, profiler: Profiler) -> None:
        self._codecs, self._profiler = codecs, profiler

    @property
    def measures(self) -> bool:
        return self._profiler.measures

    def codec(self, bound: Bound, codec: Codec, account: Account) -> Bound:
        """Return the other gauge's codec, measured."""
        return self._profiler.codec(self._codecs.codec(bound, codec, account), codec, account)

    def recomputing(self, account: Account) -> Callable[[], None]:
        """Begin to measure a recomputation. Returns a function to call at its end."""
        return self._profiler.recomputing(account)

    def share(self, storages: Iterable[SharedStorage]) -> None:
        """Take the storages that several modules save."""
        self._profiler.share(storages)


PLAIN = "plain"
LOSS_TILES = 16
TILED = "@blocks : recompute", "@mlp : recompute(tiles=8); @blocks : recompute"
AWAY = "@blocks : recompute(raw @ host)"  # of a GPU, whose memory it leaves
WARMUP_STEPS = 2  # before the step that counts: the optimizer makes its state, the store learns the order of backward
MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]


class DrySteps:
    """A model and its step, made dry.

    Parameters
    ----------
    make : returns (model, step), as for `actstore inspect`
    sizes : arguments for `make`
    make_optimizer : for a step that runs no backward itself; None for backward alone
    device : its rates; None for no times
    fsdp, tp : ranks that shard the weights, and that split the layers
    options : of each store
    """

    def __init__(
        self,
        make: Callable[..., Any],
        sizes: dict[str, int],
        make_optimizer: MakeOptimizer | None,
        device: Hardware | None = None,
        *,
        fsdp: int = 1,
        tp: int = 1,
        **options: Any,
    ) -> None:
        self._memory = LiveMemory()
        self._ranks = fsdp
        self._device = device
        self._work = Work(device) if device is not None and fsdp == tp == 1 else None
        self._mode = DryMode(self._memory, self._work)
        self._on_host = device is None or device.links.on_host
        self._plain: DryTimes | None = None
        self._stepped = WeakSet[Optimizer]()
        self._options = options
        with self._dry():
            target = read_target(getattr(make, "__name__", "make_step"), make(**sizes))
            self._model, self._step = target.model, target.step
            self._takes_store = takes_store(target.step)
            self._make_optimizer = make_optimizer
            self._optimizer: Optimizer | None = None
            self._memory.running.name(target.model)
            self._learning = [each for each in self._model.parameters() if each.requires_grad]
            for weight in self._model.parameters():
                self._memory.label(weight, "weights")
            if tp > 1:
                split_weights(self._model, tp, self._memory)
            self._units = ShardedUnits(self._model, fsdp, self._memory) if fsdp > 1 else None

    def row(self, policy: str | Plan) -> FitRow:
        """Return the peak of a step under a policy, `PLAIN` for no store."""
        with self._dry():
            if policy == PLAIN:
                self._run(nullcontext(), saved_tensors_hooks(self._note_saved, _itself))
                return self._row(PLAIN)
            row, moves = self._stored(policy)
            if not moves:
                return row
            least = self._stored(policy, is_late=False)[0].peak_bytes
            most = self._stored(policy, is_slow=True)[0].peak_bytes
            return row._replace(least_bytes=min(least, row.peak_bytes), most_bytes=max(most, row.peak_bytes))

    def quick_row(self, policy: str | Plan) -> FitRow:
        """Return the row of a policy without its range."""
        if policy == PLAIN:
            return self.row(policy)
        with self._dry():
            return self._stored(policy)[0]

    def profile(self, *, tiles: bool = False) -> Profile:
        """Return the figures of the step under the decisions that "auto" tries. It needs the rates of a device."""
        assert self._device is not None
        assert self._work is not None
        with self._dry():
            store = ProfiledStore(
                self._model, self._memory, self._work, self._device.links, tiles=tiles, **self._options
            )
            try:
                return store.profile(lambda: self._train(store))
            finally:
                store.close()

    def tiled(self) -> list[FitRow]:
        """Return rows of policies that recompute all, in tiles where the model takes them. Another row ran before."""
        outer = (name.rpartition(".")[0] for name in repeated_blocks(self._model))
        around = {"", *(name for each in outer for name in ancestry(each))}
        loss = [name for name in self._memory.running.loss if name not in around][-1:]
        tiles = [f"{name} : recompute(tiles={LOSS_TILES})" for name in loss]
        rows = []
        for rules in TILED if self._on_host else (*TILED, AWAY):
            with suppress(PolicyError, StateError):  # of a model without such modules, or whose modules mix tokens
                rows.append(self.row("; ".join([*tiles, rules])))
        return rows

    def _stored(self, policy: str | Plan, *, is_late: bool = True, is_slow: bool = False) -> tuple[FitRow, bool]:
        """Return the row of one policy, and whether a payload has left the device's memory."""
        store = DryStore(
            self._model,
            policy,
            self._memory,
            self._work,
            is_slow=is_slow,
            is_late=is_late,
            on_host=self._on_host,
            **self._options,
        )
        try:
            self._run(store, nullcontext())
            return self._row(policy.text if isinstance(policy, Plan) else policy), any(
                tier.is_used for tier in store.moves
            )
        finally:
            store.close()

    def _row(self, policy: str) -> FitRow:
        peak = self._memory.peak_bytes
        found = {label: nbytes for label, nbytes in self._memory.at_peak.items() if nbytes}
        row = FitRow(policy, peak, peak, peak, found, peak_at=self._memory.peak_at)
        if self._work is None:
            return row
        times = self._work.times()
        if self._plain is None:
            self._plain = times  # the first row
        ms = min(times.hidden), max(times.exposed)
        return row._replace(ms=ms, times_plain=times.times(self._plain))

    def _run(self, store: Any, hooks: Any) -> None:
        """Run the warm-up steps, then the one that counts."""
        for _ in range(WARMUP_STEPS):
            self._train(store)
        gc.collect()
        self._label_state()
        self._memory.reset()
        if self._work is not None:
            self._work.reset()
        with hooks:
            self._train(store)

    def _train(self, store: Any) -> None:
        ran_backward = False

        def note(leaf: Tensor) -> None:
            nonlocal ran_backward
            ran_backward = True
            if leaf.grad is not None:
                self._memory.label(leaf.grad, "gradients")
            if self._units is not None:
                self._units.note(leaf)

        watches = [leaf.register_post_accumulate_grad_hook(note) for leaf in self._learning]
        try:
            if self._takes_store:
                returned = self._step(store)
            else:
                with store:
                    returned = self._step()
            if not ran_backward:
                run_backward(dict(leaves_of(returned)))
                del returned
                self._update()
        finally:
            for watch in watches:
                watch.remove()

    def _update(self) -> None:
        """Train the weights, for a step that returns its loss."""
        if self._make_optimizer is not None and self._optimizer is None:
            self._optimizer = self._make_optimizer(self._learning)
        if self._optimizer is not None:
            self._optimizer.step()
        self._model.zero_grad()

    def _label_state(self) -> None:
        for weight in (*self._model.parameters(), *self._model.buffers()):
            self._memory.label(weight, "weights")
        mine = {id(leaf) for leaf in self._learning}
        for optimizer in {*live_optimizers(), *self._stepped}:  # gc.freeze hides some from the search
            for leaf, state in optimizer.state.items():
                for each in tree_leaves(state) if id(leaf) in mine else ():
                    if isinstance(each, Tensor):
                        self._memory.label(each, "optimizer")

    def _note_saved(self, tensor: Tensor) -> Tensor:
        label: Label = "activations"
        self._memory.label(tensor, label)
        return tensor.detach()  # an output in its own graph would be a cycle

    @contextmanager
    def _dry(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]), unreserved(), self._mode:
            token = has_values.set(False)
            updates = [
                register_optimizer_step_pre_hook(self._begin_update),
                register_optimizer_step_post_hook(self._end_update),
            ]
            try:
                yield
            finally:
                has_values.reset(token)
                for each in updates:
                    each.remove()

    def _begin_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.add(optimizer)
        self._mode.ranks = self._ranks
        self._memory.running.optimizer = type(optimizer).__name__

    def _end_update(self, *_: Any) -> None:
        self._mode.ranks = 1
        self._memory.running.optimizer = ""


def _itself(tensor: Tensor) -> Tensor:
    return tensor
