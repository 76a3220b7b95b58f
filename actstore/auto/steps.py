"""The steps of one store: the decisions that run, and what is measured of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Module

from actstore.auto.profiler import Profiler
from actstore.auto.watch import StepTimes
from actstore.base.ledger import Ledger
from actstore.devices import cpu_memory
from actstore.model.names import named_modules
from actstore.plan.decisions import rules_of
from actstore.plan.plan import Plan
from actstore.policy import Rules
from actstore.store.tierset import TierSet


class Steps:
    """The steps of one store.

    Parameters
    ----------
    sets_window : whether a plan sets the engine's window

    Attributes
    ----------
    plan : the plan that runs; None while steps are measured
    decisions, rules : the decisions of the running step by unit, and as a policy
    place : the tiers of the running step
    times : measured times of the plan's steps
    """

    place: TierSet

    def __init__(self, model: Module, ledger: Ledger, *, sets_window: bool) -> None:
        self.model, self.ledger = model, ledger
        self.profiler = Profiler(model, ledger)
        self.times = StepTimes()
        self.plan: Plan | None = None
        self.decisions: dict[str, str] = {}
        self.rules = Rules([])
        self._modules = named_modules(model)
        self._sets_window = sets_window

    def use(self, decisions: dict[str, str]) -> None:
        """Run decisions by unit."""
        self.decisions, self.rules = decisions, rules_of(decisions)

    def run(self, plan: Plan) -> None:
        """Run a plan from the step that begins now."""
        self.plan = plan
        self.use(plan.decisions)
        self.ledger.budget.set(max(plan.budget, int(plan.predicted.peak)))
        if plan.window is not None and self._sets_window:
            self.place.engine.resize(plan.window)
        self.times.clear()
        self.place.let_go()
        cpu_memory.trim()  # measured steps need more than those of the plan

    def forget(self) -> None:
        """Forget the plan, as steps are measured again."""
        self.plan = None
        self.times.clear()

    def have_changed(self, modules: Iterable[tuple[str, Module]]) -> bool:
        """Return whether the model has other modules than in the step before; the profiler reads these."""
        found = list(modules)
        if found == self._modules:
            return False
        self._modules = found
        self.profiler.look()
        return True
