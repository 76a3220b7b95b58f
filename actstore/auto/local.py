"""Decisions of one process: it measures the first steps, plans, and plans again where steps deviate from the plan."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch.nn import Module

from actstore.accuracy.influence.pairs import Pairs
from actstore.auto.machine import OOM_BUDGET_SHARE, AllocatorPeak, alloc_retries, ran_out
from actstore.auto.planner import Duel, Planner, least_of, unfit
from actstore.auto.probes import Probes
from actstore.auto.sample import Sample
from actstore.auto.steps import Steps
from actstore.auto.watch import Inputs, StepSizes, is_larger
from actstore.base.ledger import Ledger
from actstore.base.units import format_nbytes
from actstore.errors import CapacityError, StateError
from actstore.model.units import device_of
from actstore.plan.plan import Plan
from actstore.plan.values import Grants
from actstore.policy import Auto, Rules
from actstore.store.tierset import TierSet

log = logging.getLogger("actstore")

RETRY_BUDGET_SHARE = 0.95  # of the budget, after the allocator had to return cached memory to find some
TOLERATED_EXCESS = 0.005  # of a total: allocators round up
MAX_GROWTH = 1.1  # of the saved bytes since they were measured; beyond this, steps are measured again


class LocalBoard:
    """The board of one process, which decides each step by itself.

    Parameters
    ----------
    pairs : pairs of steps that measure the effect of errors
    switch : replaces the rules of a step that was just entered, and returns whether it could
    auto : the policy
    """

    def __init__(
        self,
        steps: Steps,
        grants: Grants,
        pairs: Pairs,
        switch: Callable[[Rules], bool],
        auto: Auto,
    ) -> None:
        self.planner = Planner(steps.model, steps.profiler, grants)
        self._steps = steps
        self._pairs = pairs
        self._switch = switch
        self._auto = auto
        self._sizes = StepSizes()
        self._retries = alloc_retries(device_of(steps.model) or torch.device("cpu"))
        self._measured = 0  # bytes of the largest step at the first plan
        self._why = ""  # the last message that memory ran out
        self._news = ""  # the next warning
        self._inputs = Inputs(steps.model, self._guard)
        self._guarded = False  # the running step exceeds its plan, and so recomputes all
        self._duel: Duel | None = None  # the plan and a policy in one line run in alternate steps
        self._rates = False  # the running step measures the effect of errors
        self._allocator = None if auto.total is None else AllocatorPeak(steps.model, steps.ledger)
        self._room = ""  # the last words for what a total leaves
        self._rating = _rate(self.planner.probes, pairs, steps.ledger)
        steps.ledger.budget.set(grants.device)

    @property
    def measures(self) -> bool:
        """True where the profiler may measure the running step."""
        return not self._rates

    def next(self, sample: Sample | None, modules: Iterable[tuple[str, Module]]) -> None:
        """Decide the step that begins now.

        Raises
        ------
        CapacityError : no plan fits into the budget; the error names the least possible, where known. Raised only
            before the first plan: later the plan with the least memory runs, with a warning
        """
        steps, probes = self._steps, self.planner.probes
        beside = None if self._allocator is None else self._allocator.finish(probes.memory)
        if steps.have_changed(modules):
            self._start_again("the model's modules have changed")
        elif sample is not None:
            probes.add(sample, steps.ledger.peak, beside if steps.plan is None else None)
            self._inputs.saved(sample.saved)
        if self._guarded and steps.plan is not None:
            steps.use(steps.plan.decisions)
        if steps.plan is not None:
            self._watch(sample, beside)
        self._guarded = False
        if steps.plan is None:
            self._measure()
        news, self._news = self._news, ""
        if news:
            warnings.warn(news, RuntimeWarning, stacklevel=4)

    def _measure(self) -> None:
        """Run the decisions of the next step that measures, or the first plan."""
        planner = self.planner
        self._make_room()
        decisions = planner.probes.propose(self._steps.place)
        self._rates = False
        if decisions is None and planner.grants.max_noise > 0:
            decisions = self._next_rated()
        if decisions is not None:
            self._steps.use(decisions)
            return
        self._measured = planner.probes.largest
        planner.end_probes()
        try:
            self._plan()
        except CapacityError as error:
            if not planner.planned_for:  # no plan has run yet
                if self._auto.total is not None and (least := least_of(error)):
                    probes, lasting = planner.probes, planner.probes.memory().lasting
                    sums = [peak + beside for _, peak, beside in probes.peaks_beside()]
                    total = int(lasting + min(least + (probes.most_beside() or 0), *sums, inf)) // 1024 + 1
                    error.add_note(f'actstore: or Auto(total="{total}KiB")')
                for why in planner.history:
                    error.add_note(f"actstore: {why}")
                raise
            self._plan_for_least(error)

    def begin(self) -> None:
        """Begin the step."""
        self._inputs.begin()
        if self._allocator is not None:
            measured = self._steps.times.wanted and self.measures
            self._allocator.begin(self._steps.place.device, self.planner.probes.memory, measured=measured)

    def end_forward(self, error: BaseException | None) -> None:
        """End the forward, which may have failed with `error`."""
        self._inputs.end()
        if self._allocator is not None:
            self._allocator.look()
        if error is not None:
            self.tightened(error)

    def close(self) -> None:
        """End the measurements, as the store is closed."""
        self.planner.probes.close()
        if self._allocator is not None:
            self._allocator.close()

    def state(self) -> dict[str, Any]:
        """Return what `resume` takes, as JSON values. Measurements are part of it once a plan runs."""
        plan = self._steps.plan
        if plan is None:
            return {"plan": None}
        return {
            "plan": plan.to_dict(),
            "planner": self.planner.state(),
            "measured": self._measured,
            "times": self._steps.times.state(),
            "inputs": self._inputs.state(),
        }

    def resume(self, state: dict[str, Any], place: TierSet) -> str:
        """Go on as the board that gave the state. Return why steps are measured or planned again; empty if not."""
        steps, planner = self._steps, self.planner
        plan = None if state["plan"] is None else Plan.from_dict(state["plan"])
        planner.limit(planner.user_grants)
        planner.history, planner.planned_for, planner.excess, self._measured = [], 0, False, 0
        steps.profiler.cancel()
        self._forget()
        why = unfit(plan, steps.model, place.device.torch_device)
        if state.get("noise") is not None:
            why = "the state is of a compiled model, and compile() was not called before load_state_dict()"
        if plan is None or why:
            planner.history.append(f"{why}: measured again")
            return planner.history[-1]
        self._inputs.resume(state["inputs"])
        if why := planner.resume(state["planner"]):
            planner.history.append(f"{why}: planned again")
            return planner.history[-1]
        self._measured, steps.place = state["measured"], place
        steps.run(plan)
        steps.times.resume(state["times"])
        return ""

    # -- the effect of errors -----------------------------------------------------------------------------------------

    def _next_rated(self) -> dict[str, str] | None:
        """Return the decisions of the next step that measures the effect of errors; None where enough is known."""
        try:
            decisions = next(self._rating, None)
        except StateError as error:
            self.planner.history.append(f"lossy codecs are not planned: {error}")
            log.warning("%s", self.planner.history[-1])
            return None
        self._rates = decisions is not None
        return decisions

    # -- memory that ran out ------------------------------------------------------------------------------------------

    def tightened(self, error: BaseException) -> bool:
        """Plan for less where `error` means that memory ran out; return False where it does not, or no plan needs less.

        Each error is handled once: a second call with it returns the first result.
        """
        if not ran_out(error):
            return False
        seen: bool | None = getattr(error, "actstore_tightened", None)
        if seen is None:
            seen = self._tighten()
            error.actstore_tightened = seen  # type: ignore[attr-defined]
            what = "the next step runs with less memory" if seen else "no plan needs less memory"
            error.add_note(f"actstore: {self._why}; {what}")
        return seen

    def _tighten(self) -> bool:
        held = min(self._steps.ledger.peak, self.planner.grants.device)
        self._why = f"memory ran out while activations held {format_nbytes(held)}"
        if not held or not self._give_up(int(OOM_BUDGET_SHARE * held), self._why):
            return False
        said = f"{self.planner.history[-1]}. Give a smaller budget to begin with."
        warnings.warn(said, RuntimeWarning, stacklevel=6)
        return True

    def _give_up(self, budget: int, why: str) -> bool:
        """Continue with a smaller budget; return False, with everything unchanged, where no plan keeps it."""
        planner, before = self.planner, self.planner.grants
        planner.limit(replace(before, device=budget))
        planner.history.append(f"{why}: the budget is {format_nbytes(budget)} from now on")
        try:
            if self._steps.plan is not None:
                self._plan()
        except CapacityError:
            planner.limit(before)
            planner.history.pop()
            log.warning("%s, and no plan needs less memory", why)
            return False
        log.warning("%s", planner.history[-1])
        self._steps.ledger.budget.set(budget)
        return True

    # -- plans --------------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Plan from the measurements so far, and run the plan.

        Raises
        ------
        CapacityError : no plan fits, and no measured step has kept a total
        """
        steps, planner = self._steps, self.planner
        self._make_room()
        try:
            plan, self._duel = planner.plan(steps.place, steps.plan, margin=self._inputs.spread)
        except CapacityError:
            lasting = planner.probes.memory().lasting
            bound = (1 + TOLERATED_EXCESS) * (self._auto.total_nbytes or 0) - lasting
            kept = [(ran, peak) for ran, peak, beside in planner.probes.peaks_beside() if peak + beside <= bound]
            if not kept:
                raise
            self._leave(int(min(peak for _, peak in kept)) + 1)
            plan, self._duel = planner.plan(steps.place, steps.plan, ran=kept)
        steps.run(plan)
        log.info("plan: %s", plan.certificate)

    def _make_room(self) -> None:
        """Plan with less where a total bounds optimizer states, which the first step has made, and temporary results.

        A budget that has become smaller, as memory ran out, stays.
        """
        probes, total = self.planner.probes, self._auto.total_nbytes
        if total is None:
            return
        budget = max(1, total - probes.memory().lasting - (probes.most_beside() or 0))
        if budget < self.planner.grants.device:
            self._leave(budget)
        elif probes.most_beside() is not None:
            probes.reserve(probes.most_beside() or 0)

    def _leave(self, budget: int) -> None:
        """Leave these bytes of the total to activations."""
        planner, memory, total = self.planner, self.planner.probes.memory(), self._auto.total_nbytes or 0
        planner.limit(replace(planner.grants, device=budget))
        temporary = planner.probes.most_beside()
        if temporary is not None:
            temporary = min(temporary, total - memory.lasting - budget) if budget > 1 else temporary
            planner.probes.reserve(temporary)
        planner.history = [why for why in planner.history if why != self._room]
        self._room = (
            f"optimizer states take {format_nbytes(memory.optimizer or 0)} of the total, "
            f"{f'temporary results {format_nbytes(temporary)}, ' if temporary else ''}and leave "
            f"{format_nbytes(budget)} for activations"
        )
        planner.history.append(self._room)
        self._steps.ledger.budget.set(budget)

    def _plan_for_least(self, refusal: CapacityError) -> None:
        """Run the plan with the least memory, where none keeps the budget any more."""
        steps, grants = self._steps, self.planner.grants
        self._duel = None
        steps.run(self.planner.least(steps.place, refusal, steps.plan))
        self._news = (
            f"steps hold more than before: no plan keeps the budget of {format_nbytes(grants.device)} now. The plan "
            f"with the least memory runs, about {format_nbytes(least_of(refusal))}. Give a larger budget or smaller "
            "batches"
        )

    def _exceeds_total(self, saved: int, peak: float, beside: int | None) -> str:
        """Return in words by how much the allocator exceeded the total in the step that has ended; empty if not."""
        total = self._auto.total_nbytes
        if total is None or beside is None:
            return ""
        most = self.planner.probes.memory().lasting + peak + beside
        if most <= (1 + TOLERATED_EXCESS) * total or not self.planner.needs_plan(saved):
            return ""
        self.planner.probes.add_beside(saved, beside)
        self.planner.probes.forget_peaks(self._steps.decisions)
        return f"the allocator held {format_nbytes(most)} at the peak of a step, more than the total"

    def _watch(self, sample: Sample | None, beside: int | None) -> None:
        """Check the step that has ended, and plan again where it deviates from the prediction."""
        steps, planner, probes = self._steps, self.planner, self.planner.probes
        plan, peak = steps.plan, steps.ledger.peak
        assert plan is not None
        saved = sum(account.saved for account in steps.ledger.accounts())
        if saved and sample is None:
            self._inputs.saved(saved)
        retries = alloc_retries(steps.place.device.torch_device)
        if retries > self._retries:
            self._retries = retries
            self._give_up(int(RETRY_BUDGET_SHARE * planner.grants.device), "the device's allocator was short of memory")
        elif why := self._exceeds_total(saved, peak, beside):
            self._again(why)
        elif peak > planner.grants.device and planner.needs_plan(saved):
            self._again(planner.exceeded(peak, plan))
        elif self._guarded and planner.needs_plan(saved) and is_larger(probes.largest, planner.planned_for):
            self._again(f"a step saves {format_nbytes(saved)}, more than planned for")
        elif self._has_shrunk(saved):
            self._again(f"steps save {format_nbytes(probes.largest)} at most")
        elif sample is not None and self._duel is not None:
            other, is_over = self._duel.add(sample.total * probes.scale(sample.saved), peak)
            self._duel = None if is_over else self._duel
            steps.run(other)
        elif sample is not None:
            step = steps.times.add(sample, probes.scale)
            steps.plan = plan._ran(step, max(peak, plan.measured.peak if plan.measured is not None else 0.0))
            if not planner.excess and steps.times.deviate(step, plan.predicted.step):
                self._again(f"a step took {step:.1f} ms instead of {plan.predicted.step:.1f}")

    def _guard(self, scale: float) -> None:
        """Recompute all in this step where its input, `scale` times the planned one, would exceed the budget."""
        steps, planner = self._steps, self.planner
        plan = steps.plan
        if plan is None or planner.excess or scale * plan.predicted.peak <= planner.grants.device:
            return
        before, rules = steps.decisions, steps.rules
        steps.use(planner.probes.least())
        self._guarded = self._switch(steps.rules)
        if self._guarded:
            steps.profiler.cancel()
        else:
            steps.decisions, steps.rules = before, rules

    def _has_shrunk(self, saved: int) -> bool:
        """Return whether many steps in a row have saved less than the plan expects."""
        probes = self.planner.probes
        size = self._sizes.shrunk_to(saved, probes.largest)
        if size:
            self._inputs.shrink(size / probes.largest)
            probes.shrink(size)
        return bool(size)

    def _again(self, why: str) -> None:
        """Plan again, or measure again where that fails and steps have grown."""
        self.planner.history.append(why)
        log.info("plans again: %s", why)
        try:
            self._plan()
        except CapacityError as refusal:
            if self.planner.probes.largest > MAX_GROWTH * self._measured:
                self._start_again("steps have grown")
            else:
                self._plan_for_least(refusal)

    def _start_again(self, why: str) -> None:
        """Measure again from the first step on, which recomputes all that can be."""
        self.planner.history.append(f"{why}: measured again")
        log.info("%s", self.planner.history[-1])
        self._forget()

    def _forget(self) -> None:
        """Forget the plan and the measurements."""
        self._steps.forget()
        self._steps.ledger.budget.set(self.planner.grants.device)
        self._inputs.forget()
        self.planner.forget()
        self._duel = None
        self._rating = _rate(self.planner.probes, self._pairs, self._steps.ledger)


def _rate(probes: Probes, pairs: Pairs, ledger: Ledger) -> Iterator[dict[str, str]]:
    """Yield the decisions of pairs of steps, until the effect of lossy codecs on each unit is known."""
    while units := probes.lossy():
        decisions = probes.least() | units
        effect = yield from pairs.look(partial(dict, decisions), probes.least())
        probes.rate(units, effect, {str(account.site): account.site for account in ledger.accounts()})
