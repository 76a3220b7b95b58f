"""The planner of a model: plans from the steps that one process has measured, or all ranks of a group."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from actstore.auto.excepted import mlp_for_tiles
from actstore.auto.machine import machine_of
from actstore.auto.probes import Probes
from actstore.auto.profiler import Profiler
from actstore.auto.sample import Sample
from actstore.auto.watch import MEASURED_STEPS, deviates, needs_plan, underestimate
from actstore.base.units import format_nbytes
from actstore.errors import CapacityError, ConfigError
from actstore.model.units import digest_of
from actstore.plan.build import chain_of, limits_of
from actstore.plan.fields import read_as
from actstore.plan.plan import Plan
from actstore.plan.profile import Profile, SharedBytes, UnitBytes, UnitFigures
from actstore.plan.solver.chain import LayerChain, Limits, Links
from actstore.plan.values import Grants
from actstore.store.tierset import TierSet

if TYPE_CHECKING:
    from actstore.plan.plan import Plan
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
        self.history += (why for why in self._profiler.separability.untiled.values() if why not in self.history)
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
        self,
        place: TierSet,
        current: Plan | None = None,
        *,
        device: int | None = None,
        margin: float = 0.0,
        ran: Sequence[tuple[Mapping[str, str], float]] = (),
    ) -> tuple[Plan, Duel | None]:
        """Plan from the measurements so far. The current choice stays where another gains little.

        Parameters
        ----------
        device : bytes to plan with; by default the budget
        margin : bytes for a step that is larger than any so far, where a plan fits with them
        ran : decisions of steps, and their peaks: the plan is the fastest of them

        Returns
        -------
        Plan and Duel : the latter where a policy in one line may be as fast

        Raises
        ------
        CapacityError : no plan fits; the error names the least possible, where known
        """
        from actstore.plan.outcome import beside, fastest, or_as_before, plan_of

        grants = self.grants
        room = grants.device if device is None else device
        profile, chain, limits, solution, shift = self._solve(place, room, margin, ran)
        if current is not None and not ran:
            solution = or_as_before(current.decisions, chain, limits, solution)
        plan = plan_of(profile, chain, solution, grants, shift, tuple(self.history))
        self.excess, self.planned_for = device is not None, self.probes.largest
        if solution.how == "as before" and current is not None:
            return replace(plan, rival=current.rival), None
        found = None if self.excess or ran else fastest(chain, limits, self.probes.one_lines())
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

    def _solve(
        self, place: TierSet, device: int, margin: float, ran: Sequence[tuple[Mapping[str, str], float]]
    ) -> tuple[Profile, LayerChain, Limits, Solution, float]:
        """Return the best choice within `device` bytes, and the excess of its peak over the predicted one."""
        from actstore.plan.outcome import ran_within, too_small
        from actstore.plan.solver.microbatches import solve_step

        profile, grants = self.probes.profile(place.device.torch_device), self.grants
        chain = chain_of(profile, grants.max_noise, tiles=grants.tiles)
        limits = limits_of(max(0.0, device - self._shift), grants.host, grants.disk, grants.max_noise)
        if ran and (found := ran_within(chain, limits, ran, device)) is not None:
            return profile, chain, limits, *found
        if margin:
            narrow = replace(limits, device=max(0.0, limits.device - margin))
            with suppress(CapacityError):
                return profile, chain, narrow, solve_step(chain, narrow), self._shift
        try:
            return profile, chain, limits, solve_step(chain, limits), self._shift
        except CapacityError as refused:
            steps = self.probes.peaks()
            if (found := ran_within(chain, limits, steps, device)) is not None:
                return profile, chain, limits, *found
            smallest = min((peak for _, peak in steps), default=inf)
            limiting = [unit for unit in profile.units if unit.name == refused.facts.get("layer") and unit.recomputable]
            remedy = self._remedy(limiting[0].name) if limiting else ""
            policies = self.probes.one_lines()
            raise too_small(refused, chain, limits, device, self._shift, policies, smallest, remedy) from None

    def _remedy(self, unit: str) -> str:
        """Return how a budget that a unit exceeds may do; empty where nothing is known."""
        mlp = "" if self.grants.tiles else mlp_for_tiles(self._model, unit)
        return mlp and f"Auto(..., tiles=True) may need less: it runs {mlp} in tiles, exact but for rounding."


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
    pairs = [(name, getattr(before, name), getattr(now, name)) for name in ("device", "host", "disk")]
    parts = (f"{name} {_limit(new)}, before {_limit(old)}" for name, old, new in pairs if old != new)
    return f"the budget has changed ({'; '.join(parts)})"


def _limit(nbytes: int | None) -> str:
    return "without a limit" if nbytes is None else format_nbytes(nbytes)


log = logging.getLogger("actstore")

Report = Mapping[str, Any]


class GroupPlanner(Planner):
    """Planner of ranks that run the same model: one of them runs it, on the measurements of all.

    The slowest rank decides times, and the largest decides bytes.

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

    def _remedy(self, unit: str) -> str:
        return ""  # a group takes no tiles

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
    shared = [read_as(SharedBytes, each) for each in values["shared"]]
    return Sample(**{**values, "figures": figures, "shared": shared})


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


DUEL_STEPS = 3  # of each
NEAR_SHARE = 0.1  # of the plan's predicted time: a policy that is predicted to be slower by more is not run


class Duel:
    """Steps of two plans by turns: the solver's, and a policy in one line.

    Parameters
    ----------
    plan : the solver's
    rival : the other one, which is `text`
    """

    def __init__(self, plan: Plan, rival: Plan, text: str) -> None:
        self._plans = plan, rival
        self._text = text
        self._steps: list[tuple[float, float]] = []  # milliseconds and peak, the solver's first

    def add(self, ms: float, peak: float) -> tuple[Plan, bool]:
        """Add a step. Returns the plan of the next one, and whether it has won."""
        self._steps.append((ms, peak))
        if len(self._steps) < 2 * DUEL_STEPS:
            return self._plans[len(self._steps) % 2], False
        times = [median(ms for ms, _ in self._steps[i::2]) for i in range(2)]
        best = times.index(min(times))
        mine, other = f"{times[best]:.1f} ms a step", f"{times[1 - best]:.1f} ms"
        if best:
            said = f"This is {self._text!r}: by turns it took {mine}, the solver's choice {other}."
        else:
            said = f"Faster than {self._text!r}: by turns this plan took {mine}, the policy {other}."
        peak = max(peak for _, peak in self._steps[best::2])
        return replace(self._plans[best], rival=said)._ran(times[best], peak), True
