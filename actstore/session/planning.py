"""make_plan: the function that runs a user's training step until its plan exists and has been measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from actstore.errors import StateError
from actstore.plan.build import chain_of, limits_of
from actstore.plan.outcome import plan_of
from actstore.plan.plan import Plan
from actstore.plan.profile import Profile
from actstore.plan.solver.microbatches import solve_step
from actstore.policy import Auto, parse_chooser
from actstore.rerun.state import ModelState, require_initialized
from actstore.rerun.step import leaves_of, run_backward, takes_store
from actstore.session.activation_store import MIN_NBYTES, ActivationStore
from actstore.session.controllers import grants_of
from actstore.session.entries import is_active
from actstore.tiers import Disk, Group, Host, PluginTier, Window
from actstore.tiers.options import read_tiers

MEASURED_STEPS = 4  # of one plan that are enough
MAX_STEPS = 96  # a plan that changes until then is returned as it is


def make_plan(
    model: Module,
    step: Callable[..., Any],
    budget: Auto | int | str,
    *,
    tiers: Iterable[Group | Host | Disk | PluginTier | Window] = (),
    min_bytes: int | str = MIN_NBYTES,
    stateful: Iterable[Any] = (),
) -> Plan:
    """Find the fastest policy under a budget, by running a training step some twenty to sixty times.

    Parameters
    ----------
    model : the model whose modules the plan names
    step : runs forward and backward, or returns the loss and leaves backward out, as `check_gradients` takes it. A step
        with one argument gets the store and enters it itself
    budget : bound on bytes of activations on the compute device, such as ``"20GiB"``; or `Auto`, or its text
    tiers, min_bytes : as for ActivationStore
    stateful : further objects that the step changes, with `state_dict` and `load_state_dict`: schedulers, gradient
        scalers. `make_plan` finds optimizers by itself

    Returns
    -------
    Plan : with the time and the bytes of its run; `plan.write(path)` keeps it, ``ActivationStore(model, plan)`` runs it

    Raises
    ------
    CapacityError : no plan fits into the budget; the message names the smallest possible budget
    ConfigError : an invalid option; a step that does not fit, or computes no gradient
    StateError : a store is active here, or the step never ran the model
    Whatever the step raises

    Notes
    -----
    Afterwards the model, gradients, optimizers and random generators are as before; until then their copies
    are in host memory. Not thread-safe: no other thread may train the model or use the global generators meanwhile.
    """
    if is_active():
        raise StateError(
            "make_plan was called inside a store's context. Call it outside, it enters a store of its own."
        )
    store = ActivationStore(model, _read_auto(budget), tiers=tiers, min_bytes=min_bytes)
    run = _TrialRun(model, step)
    with closing(store):
        require_initialized(model)
        with ModelState(model, (), stateful):
            return _settled(store, run)


def replan(profile: Profile, policy: Auto, tiers: Iterable[Group | Host | Disk | PluginTier | Window] = ()) -> Plan:
    """Plan for another budget from an earlier measurement, without running a step.

    Parameters
    ----------
    policy, tiers : as for `make_plan`. Only measured decisions are options: lossy codecs and tiers need a
        profile that was measured with such a limit

    Raises
    ------
    CapacityError : no plan fits into the budget; the message names the smallest possible budget
    ConfigError : an invalid option
    """
    grants = grants_of(policy, read_tiers(tiers)[0], profile.memory.reserved)
    chain = chain_of(profile, grants.max_noise, tiles=grants.tiles)
    limits = limits_of(grants.device, grants.host, grants.disk, grants.max_noise)
    return plan_of(profile, chain, solve_step(chain, limits), grants, 0.0, ())


def _read_auto(budget: Any) -> Auto:
    chooser = parse_chooser(budget) if isinstance(budget, str) else budget
    return chooser if isinstance(chooser, Auto) else Auto(budget)


def _settled(store: ActivationStore, run: _TrialRun) -> Plan:
    """Run the step until the store's plan is measured often enough, and return the plan."""
    looks = 0
    for _ in range(MAX_STEPS):
        run(store)
        plan = store.plan
        looks = looks + 1 if plan is not None and plan.measured is not None else 0  # a new plan is not yet measured
        if plan is not None and looks == MEASURED_STEPS:
            return plan
    plan = store.plan
    if plan is None:
        raise StateError(
            f"{MAX_STEPS} steps ran, and none could be measured: no backward came through the model that was given. "
            "Give the model that the step calls, not one around or beside it.",
            steps=MAX_STEPS,
        )
    return plan


class _TrialRun:
    """Trial steps with a store. The first run shows whether the step runs its backward, or the caller must."""

    def __init__(self, model: Module, step: Callable[..., Any]) -> None:
        self._model, self._step = model, step
        self._takes_store = takes_store(step)
        self._runs_backward: bool | None = None
        self._seen = False

    def __call__(self, store: ActivationStore) -> None:
        if self._runs_backward is None:
            self._runs_backward = self._first(store)
        else:
            self._finish(self._forward(store), backward=not self._runs_backward)

    def _first(self, store: ActivationStore) -> bool:
        """Run the step with hooks on all that a backward of the model reaches. Returns whether there was a backward."""
        hooks: list[Any] = [p.register_hook(self._note) for p in self._model.parameters() if p.requires_grad]
        hooks.append(self._model.register_forward_hook(self._watch_output))
        try:
            returned = self._forward(store)
        finally:
            for hook in hooks:
                hook.remove()
        seen = self._seen
        self._finish(returned, backward=not seen)
        return seen

    def _forward(self, store: ActivationStore) -> Any:
        return self._step(store) if self._takes_store else store(self._step)()

    def _finish(self, returned: Any, *, backward: bool) -> None:
        if backward:
            run_backward(dict(leaves_of(returned)))

    def _watch_output(self, _module: Module, _args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._note)

    def _note(self, _grad: Tensor) -> None:
        self._seen = True
