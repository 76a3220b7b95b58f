"""The plan of a controller and what it was made from, which another process can take over."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch.nn import Module

from actstore.auto.inputs import Inputs
from actstore.auto.machine import machine_of
from actstore.auto.probes import Probes
from actstore.auto.profiler import Profiler
from actstore.auto.watch import StepTimes
from actstore.base.ledger import Ledger
from actstore.base.units import format_nbytes
from actstore.errors import ConfigError
from actstore.model.units import digest_of
from actstore.plan.build import text_of
from actstore.plan.plan import Plan
from actstore.plan.wish import Wish
from actstore.policy import Rules
from actstore.store.tierset import TierSet


class PlanningState:
    """State of a controller that plans by itself.

    Attributes
    ----------
    plan : the plan that runs; None while steps are measured
    """

    _inputs: Inputs

    def __init__(self, model: Module, ledger: Ledger, wish: Wish, *, sets_window: bool) -> None:
        self.plan: Plan | None = None
        self.profiler = Profiler(model, ledger)
        self.probes = Probes(self.profiler, model, wish)
        self._model = model
        self._ledger = ledger
        self._given = self._wish = wish
        self._sets_window = sets_window
        ledger.budget.set(wish.device)
        self._decisions: dict[str, str] = {}
        self._rules = Rules([])
        self._shift = 0.0  # the largest excess of a measured peak over the predicted one
        self._times = StepTimes()
        self._history: list[str] = []
        self._measured = 0  # bytes of the largest step at the first plan,
        self._planned_for = 0  # and at the last
        self._excess = False  # no plan keeps the budget; the one with the least memory runs

    def state(self) -> dict[str, Any]:
        """Return what `resume` takes, as JSON values. Measurements are part of it once a plan runs."""
        if self.plan is None:
            return {"plan": None}
        return {
            "plan": self.plan.to_dict(),
            "given": asdict(self._given),
            "wish": asdict(self._wish),
            "limit": self._ledger.budget.limit,
            "numbers": [self._shift, self._measured, self._planned_for, self._excess],
            "history": self._history,
            "times": self._times.state(),
            "inputs": self._inputs.state(),
            "probes": self.probes.state(),
        }

    def resume(self, state: dict[str, Any], place: TierSet) -> str:
        """Go on as the controller that gave the state. Return why steps are measured or planned again; empty if not."""
        plan = None if state["plan"] is None else Plan.from_dict(state["plan"])
        self._wish, self._history = self._given, []
        self._measured, self._planned_for, self._excess = 0, 0, False
        self.profiler.cancel()
        self._forget()
        why = unfit(plan, self._model, place.device.torch_device)
        if state.get("noise") is not None:
            why = "the state is of a compiled model, and compile() was not called before load_state_dict()"
        if plan is None or why:
            self._history.append(f"{why}: measured again")
            return self._history[-1]
        self.probes.resume(state["probes"])
        self._inputs.resume(state["inputs"])
        self._history = list(state["history"])
        given = Wish(**state["given"])
        if given != self._given:
            self._history.append(f"{changed(given, self._given)}: planned again")
            return self._history[-1]
        self._wish = Wish(**state["wish"])
        self.probes.limit(self._wish)
        self._shift, self._measured, self._planned_for, self._excess = state["numbers"]
        self.plan = plan
        self._use(plan.decisions)
        self._ledger.budget.set(state["limit"])
        if plan.window is not None and self._sets_window:
            place.engine.resize(plan.window)
        self._times.resume(state["times"])
        return ""

    def _use(self, decisions: dict[str, str]) -> None:
        self._decisions = decisions
        self._rules = Rules.parse(text_of(decisions))

    def _forget(self) -> None:
        """Forget the plan and the measurements, as the next step is the first of new ones."""
        self.plan, self._shift = None, 0.0
        self._times.clear()
        self._inputs.forget()
        self._ledger.budget.set(self._wish.device)
        self.probes.close()
        self.probes = Probes(self.profiler, self._model, self._wish, self.probes)


def unfit(plan: Plan | None, model: Module, device: torch.device) -> str:
    """Return why a saved plan cannot run on a model and a device; empty where it can."""
    if plan is None:
        return "steps were still measured when the state was saved"
    try:
        plan.check(digest_of(model), machine_of(device))
    except ConfigError as error:
        return f"the state was saved on another model or machine ({error.facts['differences']})"
    return ""


def changed(before: Wish, now: Wish) -> str:
    """Return in words which limits have changed."""
    pairs = [(name, limit, asdict(now)[name]) for name, limit in asdict(before).items() if name != "max_noise"]
    parts = (f"{name} {_limit(new)}, before {_limit(old)}" for name, old, new in pairs if old != new)
    return f"the budget has changed ({'; '.join(parts)})"


def _limit(nbytes: int | None) -> str:
    return "without a limit" if nbytes is None else format_nbytes(nbytes)
