"""The planner of a group of ranks: one of them runs it, with the measurements of all."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from torch.nn import Module

from actstore.auto.probes import Probes
from actstore.auto.profiler import Profiler, Sample
from actstore.auto.slowest import sample_of, slowest_sample
from actstore.auto.watch import MEASURED_STEPS, deviates, is_news, underestimate
from actstore.base.units import format_nbytes
from actstore.errors import CapacityError
from actstore.plan.build import chain_of, limits_of
from actstore.plan.plan import Plan
from actstore.plan.solver.chain import Links
from actstore.plan.wish import Wish
from actstore.store.tierset import TierSet

log = logging.getLogger("actstore")

Report = Mapping[str, Any]


class JointPlanner:
    """Planner of ranks that run the same model.

    A report of a rank has "samples" (a dict of `Sample` by step), "peak" and "saved" (bytes of its largest step), and
    "writers" (as in `Profiler`) and "bound" (as in `Separability`).

    Parameters
    ----------
    wish, links : the tightest and the slowest of all ranks
    """

    def __init__(self, model: Module, profiler: Profiler, wish: Wish, links: Links) -> None:
        self.probes = Probes(profiler, model, wish)
        self.probes.use(links)
        self._profiler = profiler
        self._wish = wish
        self._shift = 0.0  # the largest excess of a measured peak over the predicted one
        self._planned_for = 0  # bytes of the largest step at the last plan
        self._excess = False  # no plan keeps the budget; the one with the least memory runs
        self._history: list[str] = []
        self._reviews = 0
        self._time_review = 1  # the number of the next review that may plan again because of time

    def state(self) -> dict[str, Any]:
        """Return what `resume` takes, as JSON values."""
        return {
            "probes": self.probes.state(),
            "numbers": [self._shift, self._planned_for, self._excess, self._reviews, self._time_review],
            "history": self._history,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on as the planner that gave the state."""
        self.probes.resume(state["probes"])
        self._shift, self._planned_for, self._excess, self._reviews, self._time_review = state["numbers"]
        self._history = list(state["history"])

    def propose(self, place: TierSet, reports: Sequence[Report]) -> dict[str, str] | Plan:
        """Return the decisions of the next step that measures, or the plan where enough is known.

        Raises
        ------
        CapacityError : no plan fits into the budget; the error names the least possible
        """
        self._add(reports, max(report["peak"] for report in reports))
        decisions = self.probes.propose(place)
        if decisions is not None:
            return decisions
        self._shift = max(self._shift, self.probes.excess)
        if self.probes.has_met:
            self.probes.close()
        return self._plan(place, self._wish.device)

    def review(self, place: TierSet, plan: Plan, reports: Sequence[Report]) -> Plan | None:
        """Return a plan to run instead of `plan`, where the steps that ranks report deviate from its prediction."""
        before, budget = self.probes.largest, self._wish.device
        peak = max(report["peak"] for report in reports)
        samples = self._add(reports)
        self.probes.grow(max(report["saved"] for report in reports))
        self._reviews += 1
        why = ""
        largest = self.probes.largest
        if peak > budget and is_news(largest, before, excess=self._excess):
            self._shift += underestimate(peak, plan.predicted.peak, largest, self._planned_for)
            why = f"a step held {format_nbytes(peak)}, more than the budget"
        elif len(samples) >= MEASURED_STEPS and not self._excess and self._reviews >= self._time_review:
            step = median(sample.total * self.probes.scale(sample.saved) for sample in samples)
            if deviates(step, plan.predicted.step):
                self._time_review = 2 * self._reviews  # it may be noise
                why = f"a step took {step:.1f} ms instead of {plan.predicted.step:.1f}"
        if not why:
            return None
        log.info("plans again for the group: %s", why)
        self._history.append(why)
        try:
            new = self._plan(place, budget, plan)
        except CapacityError as refusal:
            new = self._plan(place, int(float(refusal.facts["least"]) * (1 + 1e-6)) + 1, plan)
            log.warning("%s, and no plan of the group keeps to it: the one that needs least is next", why)
            self._excess = True
        return None if new.decisions == plan.decisions else new

    def _add(self, reports: Sequence[Report], peak: float = 0.0) -> list[Sample]:
        """Add the steps that all ranks have measured, and return them."""
        for report in reports:
            self._profiler.writers.update(report["writers"])
            self._profiler.separability.bound.update(report["bound"])
        steps = [step for step in reports[0]["samples"] if all(step in report["samples"] for report in reports)]
        samples = [slowest_sample([sample_of(report["samples"][step]) for report in reports]) for step in steps]
        for sample in samples:
            self.probes.add(sample, peak)
        return samples

    def _plan(self, place: TierSet, device: int, current: Plan | None = None) -> Plan:
        """Return the best plan within `device` bytes; the choice of the current one where another gains little."""
        from actstore.plan.outcome import or_as_before, plan_of
        from actstore.plan.rival import too_small
        from actstore.plan.solver.microbatches import solve_step

        wish = self._wish
        profile = self.probes.profile(place.device.torch_device)
        chain = chain_of(profile)
        limits = limits_of(max(0.0, device - self._shift), wish.host, wish.disk, 0.0)
        try:
            solution = solve_step(chain, limits)
        except CapacityError as refused:
            raise too_small(refused, chain, limits, device, self._shift, self.probes.one_lines()) from None
        if current is not None:
            solution = or_as_before(current.decisions, chain, limits, solution)
        self._planned_for, self._excess = self.probes.largest, False
        return plan_of(profile, chain, solution, wish, self._shift, tuple(self._history))
