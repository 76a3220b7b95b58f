"""The planner of a model: plans from the steps that one process has measured, or all ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from actstore.auto.duel import NEAR_SHARE, Duel
from actstore.auto.machine import machine_of
from actstore.auto.probes import Probes
from actstore.auto.profiler import Profiler
from actstore.auto.watch import needs_plan, underestimate
from actstore.base.units import format_nbytes
from actstore.errors import CapacityError, ConfigError
from actstore.model.units import digest_of
from actstore.plan.build import chain_of, limits_of
from actstore.plan.plan import Plan
from actstore.plan.profile import Profile
from actstore.plan.solver.chain import LayerChain, Limits
from actstore.plan.values import Grants
from actstore.store.tierset import TierSet

if TYPE_CHECKING:
    from actstore.plan.solver.solve import Solution


class Planner:
    """The planner of a model.

    Attributes
    ----------
    probes : the measured steps
    user_grants, grants : the limits of the user, and those of the next plan: after memory ran out, a smaller budget
    history : why steps were measured or planned again
    excess : whether no plan keeps the budget, and the one with the least memory runs
    """

    def __init__(self, model: Module, profiler: Profiler, grants: Grants) -> None:
        self.probes = Probes(profiler, model, grants)
        self.user_grants = self.grants = grants
        self.history: list[str] = []
        self.excess = False
        self.planned_for = 0  # bytes of the largest step at the last plan
        self._model, self._profiler = model, profiler
        self._shift = 0.0  # the largest excess of a measured peak over the predicted one

    def state(self) -> dict[str, Any]:
        """Return what `resume` takes, as JSON values."""
        return {
            "user_grants": asdict(self.user_grants),
            "grants": asdict(self.grants),
            "numbers": [self._shift, self.planned_for, self.excess],
            "history": self.history,
            "probes": self.probes.state(),
        }

    def resume(self, state: Mapping[str, Any]) -> str:
        """Go on as the planner that gave the state. Return in words how the limits have changed; empty if not."""
        self.probes.resume(state["probes"])
        self.history = list(state["history"])
        given = Grants(**state["user_grants"])
        if given != self.user_grants:
            return changed(given, self.user_grants)
        self.limit(Grants(**state["grants"]))
        self._shift, self.planned_for, self.excess = state["numbers"]
        return ""

    def limit(self, grants: Grants) -> None:
        """Set the limits of later plans and measurements."""
        self.grants = grants
        self.probes.limit(grants)

    def forget(self) -> None:
        """Forget the measurements, as the next step is the first of new ones."""
        self._shift = 0.0
        self.probes.close()
        self.probes = Probes(self._profiler, self._model, self.grants, self.probes)

    def end_probes(self) -> None:
        """End the steps that measure, before the first plan."""
        self._shift = max(self._shift, self.probes.excess)
        if self.probes.has_met:
            self.probes.close()

    def needs_plan(self, saved: int, known: int | None = None) -> bool:
        """Return whether a step over the budget, which has saved these bytes, requires another plan.

        Parameters
        ----------
        known : bytes of the largest step before; by default that of the probes
        """
        before = self.probes.largest if known is None else known
        self.probes.grow(saved)
        return needs_plan(self.probes.largest, before, excess=self.excess)

    def exceeded(self, peak: float, plan: Plan) -> str:
        """Correct the predictions after a step over the budget. Return in words why another plan is made."""
        self._shift += underestimate(peak, plan.predicted.peak, self.probes.largest, self.planned_for)
        return f"a step held {format_nbytes(peak)}, more than the budget"

    def plan(
        self, place: TierSet, current: Plan | None = None, *, device: int | None = None, margin: float = 0.0
    ) -> tuple[Plan, Duel | None]:
        """Plan from the measurements so far. The current choice stays where another gains little.

        Parameters
        ----------
        device : bytes to plan with; by default the budget
        margin : bytes for a step that is larger than any so far, where a plan fits with them

        Returns
        -------
        Plan and Duel : the latter where a policy in one line may be as fast

        Raises
        ------
        CapacityError : no plan fits; the error names the least possible, where known
        """
        from actstore.plan.outcome import beside, fastest, or_as_before, plan_of

        grants = self.grants
        profile, chain, limits, solution = self._solve(place, grants.device if device is None else device, margin)
        if current is not None:
            solution = or_as_before(current.decisions, chain, limits, solution)
        plan = plan_of(profile, chain, solution, grants, self._shift, tuple(self.history))
        self.excess, self.planned_for = device is not None, self.probes.largest
        if solution.how == "as before" and current is not None:
            return replace(plan, rival=current.rival), None
        found = None if self.excess else fastest(chain, limits, self.probes.one_lines())
        if found is None:
            return plan, None
        text, other = found
        plan = replace(plan, rival=beside(text, other, solution.evaluation))
        if other.choice == solution.choice or other.total > (1 + NEAR_SHARE) * solution.evaluation.total:
            return plan, None
        rival = replace(solution, choice=other.choice, evaluation=other)
        return plan, Duel(plan, plan_of(profile, chain, rival, grants, self._shift, plan.history), text)

    def least(self, place: TierSet, refusal: CapacityError, current: Plan | None = None) -> Plan:
        """Return the plan with the least memory, where `refusal` says that none keeps the budget any more."""
        return self.plan(place, current, device=int(least_of(refusal) * (1 + 1e-6)) + 1)[0]

    def _solve(self, place: TierSet, device: int, margin: float) -> tuple[Profile, LayerChain, Limits, Solution]:
        """Return the best choice within `device` bytes."""
        from actstore.plan.outcome import too_small
        from actstore.plan.solver.microbatches import solve_step

        profile, grants = self.probes.profile(place.device.torch_device), self.grants
        chain = chain_of(profile, grants.max_noise)
        limits = limits_of(max(0.0, device - self._shift), grants.host, grants.disk, grants.max_noise)
        if margin:
            narrow = replace(limits, device=max(0.0, limits.device - margin))
            with suppress(CapacityError):
                return profile, chain, narrow, solve_step(chain, narrow)
        try:
            return profile, chain, limits, solve_step(chain, limits)
        except CapacityError as refused:
            raise too_small(refused, chain, limits, device, self._shift, self.probes.one_lines()) from None


def least_of(refusal: CapacityError) -> float:
    """Return the bytes that a plan needs at least."""
    return float(refusal.facts.get("least", 0))


def unfit(plan: Plan | None, model: Module, device: torch.device) -> str:
    """Return why a saved plan cannot run on a model and a device; empty where it can."""
    if plan is None:
        return "steps were still measured when the state was saved"
    try:
        plan.check(digest_of(model), machine_of(device))
    except ConfigError as error:
        return f"the state was saved on another model or machine ({error.facts['differences']})"
    return ""


def changed(before: Grants, now: Grants) -> str:
    """Return in words which limits have changed."""
    pairs = [(name, limit, asdict(now)[name]) for name, limit in asdict(before).items() if name != "max_noise"]
    parts = (f"{name} {_limit(new)}, before {_limit(old)}" for name, old, new in pairs if old != new)
    return f"the budget has changed ({'; '.join(parts)})"


def _limit(nbytes: int | None) -> str:
    return "without a limit" if nbytes is None else format_nbytes(nbytes)
