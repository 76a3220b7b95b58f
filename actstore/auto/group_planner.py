"""The planner of a group of ranks: one of them runs it, on the measurements of all.

The slowest rank decides times, and the largest decides bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from torch.nn import Module

from actstore.auto.planner import Planner
from actstore.auto.profiler import Profiler
from actstore.auto.sample import Sample
from actstore.auto.watch import MEASURED_STEPS, deviates
from actstore.errors import CapacityError
from actstore.plan.plan import Plan
from actstore.plan.profile import UnitBytes, UnitFigures
from actstore.plan.solver.chain import Links
from actstore.plan.values import Grants
from actstore.store.tierset import TierSet

log = logging.getLogger("actstore")

Report = Mapping[str, Any]


class GroupPlanner(Planner):
    """Planner of ranks that run the same model.

    A report of a rank has "samples" (a dict of `Sample` by step), "peak" and "saved" (bytes of its largest step), and
    "writers" (as in `Profiler`) and "bound" (as in `Separability`).

    Parameters
    ----------
    grants, links : the tightest and the slowest of all ranks
    """

    def __init__(self, model: Module, profiler: Profiler, grants: Grants, links: Links) -> None:
        super().__init__(model, profiler, grants)
        self.probes.use(links)
        self._reviews = 0
        self._time_review = 1  # the number of the next review that may plan again because of time

    def state(self) -> dict[str, Any]:
        """Return what `resume` takes, as JSON values."""
        return {**super().state(), "reviews": [self._reviews, self._time_review]}

    def resume(self, state: Mapping[str, Any]) -> str:
        """Go on as the planner that gave the state."""
        self._reviews, self._time_review = state["reviews"]
        return super().resume(state)

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
        self.end_probes()
        return self.plan(place)[0]

    def review(self, place: TierSet, plan: Plan, reports: Sequence[Report]) -> Plan | None:
        """Return a plan to run instead of `plan`, where the steps that ranks report deviate from its prediction."""
        peak = max(report["peak"] for report in reports)
        known = self.probes.largest
        samples = self._add(reports)
        needs_plan = self.needs_plan(max(report["saved"] for report in reports), known)
        self._reviews += 1
        why = ""
        if peak > self.grants.device and needs_plan:
            why = self.exceeded(peak, plan)
        elif len(samples) >= MEASURED_STEPS and not self.excess and self._reviews >= self._time_review:
            step = median(sample.total * self.probes.scale(sample.saved) for sample in samples)
            if deviates(step, plan.predicted.step):
                self._time_review = 2 * self._reviews  # it may be noise
                why = f"a step took {step:.1f} ms instead of {plan.predicted.step:.1f}"
        if not why:
            return None
        log.info("plans again for the group: %s", why)
        self.history.append(why)
        try:
            new, _ = self.plan(place, plan)
        except CapacityError as refusal:
            new = self.least(place, refusal, plan)
            log.warning("%s, and no plan of the group keeps the budget: the one with the least memory runs next", why)
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


def sample_of(values: dict[str, Any]) -> Sample:
    """Build a sample from its `asdict`."""
    figures = {unit: [_figures_of(each) for each in of_unit] for unit, of_unit in values["figures"].items()}
    return Sample(**{**values, "figures": figures})


def _figures_of(values: dict[str, Any]) -> UnitFigures:
    parts = {name: UnitBytes(**part) for name, part in values["parts"].items()}
    return UnitFigures(**{**values, "parts": parts})


def slowest_sample(samples: Sequence[Sample]) -> Sample:
    """Return the sample that took longest, with the largest sizes of all in each part of each unit."""
    first, *others = sorted(samples, key=lambda sample: -sample.total)
    figures = dict(first.figures)
    for other in others:
        for unit, theirs in other.figures.items():
            ours = figures.get(unit, theirs)
            if [each.decision for each in ours] == [each.decision for each in theirs]:
                figures[unit] = [_with_most_bytes(*pair) for pair in zip(ours, theirs, strict=True)]
    calls = {unit: max(sample.calls.get(unit, 0) for sample in samples) for unit in figures}
    turns = {unit: _most(unit, samples) for unit in first.turns}
    return replace(first, figures=figures, calls=calls, turns=turns)


def _most(unit: str, samples: Sequence[Sample]) -> list[int]:
    """Return the most calls of a unit at each turn; all at one turn, where ranks have other numbers of turns."""
    numbers = {len(turns) for sample in samples for turns in sample.turns.values()}
    nothing = [0] * max(numbers)
    found = [sample.turns.get(unit, nothing) for sample in samples]
    return [max(each) for each in zip(*found, strict=True)] if len(numbers) == 1 else [max(map(max, found))]


def _with_most_bytes(ours: UnitFigures, theirs: UnitFigures) -> UnitFigures:
    names = dict.fromkeys([*ours.parts, *theirs.parts])
    parts = {}
    for name in names:
        pair = asdict(ours.parts.get(name, UnitBytes())), asdict(theirs.parts.get(name, UnitBytes()))
        parts[name] = UnitBytes(**{field: max(each[field] for each in pair) for field in pair[0]})
    return replace(ours, parts=parts, transient=max(ours.transient, theirs.transient))


def slowest_links(links: Sequence[Links]) -> Links:
    """Return the links with the lowest rates of all."""
    lowest = {name: min(getattr(each, name) for each in links) for name in asdict(links[0])}
    return Links(**lowest)


def tightest_grants(grants: Sequence[Grants]) -> Grants:
    """Return the grants with the lowest limits of all."""
    granted: dict[str, list[int]] = {}
    for place in ("host", "disk"):
        granted[place] = [limit for each in grants if (limit := getattr(each, place)) is not None]
    return Grants(
        min(each.device for each in grants),
        min(granted["host"], default=None),
        min(granted["disk"], default=None),
        min(each.max_noise for each in grants),
    )
