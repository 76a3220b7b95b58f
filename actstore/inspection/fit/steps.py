"""Dry steps of one model: plain, and with a store for each policy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from actstore.devices.cpu_memory import unreserved
from actstore.inspection.fit.dry import DryMode
from actstore.inspection.fit.memory import Label, LiveMemory
from actstore.inspection.fit.profiled import ProfiledStore
from actstore.inspection.fit.result import FitRow
from actstore.inspection.fit.shards import ShardedUnits
from actstore.inspection.fit.split import split_weights
from actstore.inspection.fit.store import DryStore
from actstore.inspection.fit.work import DryTimes, Work
from actstore.plan.hardware import Hardware
from actstore.plan.plan import Plan
from actstore.plan.profile import Profile
from actstore.rerun.optimizers import live_optimizers
from actstore.rerun.step import leaves_of, run_backward, takes_store
from actstore.rerun.target import read_target

PLAIN = "plain"
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

    def profile(self) -> Profile:
        """Return the figures of the step under the decisions that "auto" tries. It needs the rates of a device."""
        assert self._device is not None
        assert self._work is not None
        with self._dry():
            store = ProfiledStore(self._model, self._memory, self._work, self._device.links, **self._options)
            try:
                return store.profile(lambda: self._train(store))
            finally:
                store.close()

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
        row = FitRow(policy, peak, peak, peak, found)
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
            updates = [
                register_optimizer_step_pre_hook(self._begin_update),
                register_optimizer_step_post_hook(self._end_update),
            ]
            try:
                yield
            finally:
                for each in updates:
                    each.remove()

    def _begin_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.add(optimizer)
        self._mode.ranks = self._ranks

    def _end_update(self, *_: Any) -> None:
        self._mode.ranks = 1


def _itself(tensor: Tensor) -> Tensor:
    return tensor
