"""The controller that finds a policy for a budget during training.

It measures the first steps, plans, runs the plan, and plans again when steps deviate from the prediction. Every step on
the way is an ordinary training step.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from actstore.accuracy.influence.pairs import Pairs
from actstore.auto.duel import NEAR_SHARE, Duel
from actstore.auto.inputs import Inputs
from actstore.auto.memory import alloc_retries, ran_out
from actstore.auto.planning_state import PlanningState
from actstore.auto.profiler import Profiler, Sample
from actstore.auto.rating import Rating
from actstore.auto.watch import StepSizes, is_larger, is_news, underestimate
from actstore.base.ledger import Ledger
from actstore.base.units import format_nbytes
from actstore.errors import CapacityError, StateError
from actstore.model.names import named_modules
from actstore.model.units import device_of
from actstore.plan.build import chain_of, limits_of
from actstore.plan.profile import Profile
from actstore.plan.solver.chain import LayerChain, Limits
from actstore.plan.wish import Wish
from actstore.policy import Rules
from actstore.store.tierset import TierSet

if TYPE_CHECKING:
    from actstore.plan.plan import Plan
    from actstore.plan.solver.solve import Solution

log = logging.getLogger("actstore")

OOM_BUDGET_SHARE = 0.9  # of the bytes held when memory ran out
RETRY_BUDGET_SHARE = 0.95  # of the budget, after the allocator had to return cached memory to find some
MAX_GROWTH = 1.1  # of the saved bytes since they were measured; beyond this, steps are measured again


class AutoController(PlanningState):
    """The policy of one store, step by step. Not thread-safe: the session calls it under its lock.

    Parameters
    ----------
    switch : replaces the rules of a step that was just entered, and returns whether it could
    sets_window : whether the plan sets the engine's window
    """

    name = "auto"

    def __init__(
        self,
        model: Module,
        ledger: Ledger,
        wish: Wish,
        pairs: Pairs,
        switch: Callable[[Rules], bool],
        *,
        sets_window: bool,
    ) -> None:
        super().__init__(model, ledger, wish, sets_window=sets_window)
        self._pairs = pairs
        self._rating = Rating(self.probes, pairs, ledger)
        self._place: TierSet | None = None
        self._sizes = StepSizes()
        self._retries = alloc_retries(device_of(model) or torch.device("cpu"))
        self._why = ""  # the last message that memory ran out
        self._news = ""  # the next warning
        self._modules = named_modules(model)
        self._switch = switch
        self._inputs = Inputs(model, self._guard)
        self._guarded = False  # the running step exceeds its plan, and so recomputes all
        self._duel: Duel | None = None  # the plan and a policy in one line run by turns

    @property
    def gauge(self) -> Profiler:
        """The profiler that measures the store's own work."""
        return self.profiler

    # -- the session's calls ------------------------------------------------------------------------------------------

    def next(self, place: TierSet, modules: Iterable[tuple[str, Module]]) -> Rules:
        """Return the policy of the step that begins now.

        Parameters
        ----------
        modules : the current result of `named_modules` for the model

        Raises
        ------
        CapacityError : no plan fits into the budget; the error names the least possible, where known. Raised only
            before the first plan: later the plan with the least memory runs, with a warning
        """
        self._place = place
        sample = self.profiler.finish()
        if sample is not None and not sample.backward:  # an evaluation
            sample = None
        found = list(modules)
        if found != self._modules:
            self._modules = found
            self.profiler.look()
            self._start_again("the model's modules have changed")
        elif sample is not None:
            self.probes.add(sample, self._ledger.peak)
            self._inputs.saved(sample.saved)
        if self._guarded and self.plan is not None:
            self._use(self.plan.decisions)
        if self.plan is not None:
            self._watch(sample)
        self._guarded = False
        if self.plan is None:
            decisions = self.probes.propose(place)
            self._rating.runs = False
            if decisions is None and self._wish.max_noise > 0:
                decisions = self._next_rated()
            if decisions is None:
                self._first_plan()
            else:
                self._use(decisions)
        news, self._news = self._news, ""
        if news:
            warnings.warn(news, RuntimeWarning, stacklevel=3)
        return self._rules

    def close(self) -> None:
        """End the measurements, as the store is closed."""
        self.probes.close()

    def watching(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return the pack hook of an entry, given the store's own: this policy leaves it as it is."""
        return pack

    def begin(self) -> None:
        """Begin the step, and measure it where the plan is to be checked."""
        if self.plan is not None:
            self._times.begin()
        if torch.is_grad_enabled() and self._times.wanted and not self._rating.runs:
            assert self._place is not None
            self.profiler.begin(self._place.device, self._decisions)
        if torch.is_grad_enabled():
            self._inputs.begin()

    def end_forward(self, error: BaseException | None) -> None:
        """End the forward, which may have failed with `error`."""
        self._inputs.end()
        if error is None:
            self.profiler.end_forward()
        else:
            self.profiler.cancel()
            self.tightened(error)

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
            what = "the next step runs with less" if seen else "no plan needs so little"
            error.add_note(f"actstore: {self._why}; {what}")
        return seen

    def _tighten(self) -> bool:
        held = min(self._ledger.peak, self._wish.device)
        self._why = f"memory ran out while activations held {format_nbytes(held)}"
        if not held or not self._give_up(int(OOM_BUDGET_SHARE * held), self._why):
            return False
        warnings.warn(f"{self._history[-1]}. Give a smaller budget to begin with.", RuntimeWarning, stacklevel=5)
        return True

    def _give_up(self, budget: int, why: str) -> bool:
        """Continue with a smaller budget; return False, with everything unchanged, where no plan needs so little."""
        before = self._wish
        self._wish = replace(before, device=budget)
        self._history.append(f"{why}: the budget is {format_nbytes(budget)} from now on")
        try:
            if self.plan is not None:
                self._make_plan()
        except CapacityError:
            self._wish = before
            self._history.pop()
            log.warning("%s, and no plan needs less", why)
            return False
        log.warning("%s", self._history[-1])
        self.probes.limit(self._wish)
        self._ledger.budget.set(budget)
        return True

    # -- planning -----------------------------------------------------------------------------------------------------

    def _next_rated(self) -> dict[str, str] | None:
        """Return the decisions of the next step that measures the effect of errors; None where enough is known."""
        try:
            return self._rating.next()
        except StateError as error:
            self._history.append(f"nothing that loses is planned: {error}")
            log.warning("%s", self._history[-1])
            return None

    def _first_plan(self) -> None:
        """Make the plan after the measured steps."""
        self._measured = self.probes.largest
        self._shift = max(self._shift, self.probes.excess)
        if self.probes.has_met:
            self.probes.close()
        try:
            self._make_plan()
        except CapacityError as error:
            if not self._planned_for:  # no plan has run yet
                for why in self._history:
                    error.add_note(f"actstore: {why}")
                raise
            self._make_least(error)

    def _make_least(self, refusal: CapacityError) -> None:
        """Run the plan with the least memory, where none keeps the budget any more."""
        least = float(refusal.facts.get("least", 0))
        self._excess = True
        self._make_plan(int(least * (1 + 1e-6)) + 1)
        self._news = (
            f"steps hold more than before: no plan keeps the budget of {format_nbytes(self._wish.device)} now. The one "
            f"that needs least runs, with about {format_nbytes(least)}. Give a larger budget or smaller batches"
        )

    def _solve(self, device: int) -> tuple[Profile, LayerChain, Limits, Solution]:
        """Return the best choice within `device` bytes, from the measurements so far."""
        from actstore.plan.rival import too_small
        from actstore.plan.solver.microbatches import solve_step

        assert self._place is not None
        profile, wish = self.probes.profile(self._place.device.torch_device), self._wish
        chain = chain_of(profile, wish.max_noise)
        limits = limits_of(max(0.0, device - self._shift), wish.host, wish.disk, wish.max_noise)
        margin = self._inputs.spread  # allows for a larger step than any so far
        if margin:
            narrow = replace(limits, device=max(0.0, limits.device - margin))
            with suppress(CapacityError):
                return profile, chain, narrow, solve_step(chain, narrow)
        try:
            return profile, chain, limits, solve_step(chain, limits)
        except CapacityError as refused:
            raise too_small(refused, chain, limits, device, self._shift, self.probes.one_lines()) from None

    def _make_plan(self, device: int | None = None) -> None:
        """Plan from the measurements so far. The current choice stays where another gains little.

        Parameters
        ----------
        device : bytes to plan with; by default the budget
        """
        from actstore.plan.outcome import or_as_before, plan_of
        from actstore.plan.rival import beside, fastest

        assert self._place is not None
        wish = self._wish
        profile, chain, limits, solution = self._solve(wish.device if device is None else device)
        if self.plan is not None:
            solution = or_as_before(self._decisions, chain, limits, solution)
        plan = plan_of(profile, chain, solution, wish, self._shift, tuple(self._history))
        self._duel, self._excess = None, device is not None
        self._ledger.budget.set(wish.device if device is None else max(device, wish.device))
        self._planned_for = self.probes.largest
        if solution.how == "as before" and self.plan is not None:
            plan = replace(plan, rival=self.plan.rival)
        elif not self._excess and (found := fastest(chain, limits, self.probes.one_lines())) is not None:
            text, other = found
            plan = replace(plan, rival=beside(text, other, solution.evaluation))
            if other.choice != solution.choice and other.total <= (1 + NEAR_SHARE) * solution.evaluation.total:
                rival = replace(solution, choice=other.choice, evaluation=other)
                self._duel = Duel(plan, plan_of(profile, chain, rival, wish, self._shift, plan.history), text)
        self._run(plan)
        log.info("plan: %s", plan.certificate)

    def _run(self, plan: Plan) -> None:
        """Run a plan from the step that begins now."""
        assert self._place is not None
        self.plan = plan
        self._use(plan.decisions)
        if plan.window is not None and self._sets_window:
            self._place.engine.resize(plan.window)
        self._times.clear()

    # -- the closed loop ----------------------------------------------------------------------------------------------

    def _watch(self, sample: Sample | None) -> None:
        """Check the step that has ended, and plan again where it deviates from the prediction."""
        plan, peak, probes = self.plan, self._ledger.peak, self.probes
        assert plan is not None
        assert self._place is not None
        saved = sum(account.saved for account in self._ledger.accounts())
        if saved and sample is None:
            self._inputs.saved(saved)
        retries = alloc_retries(self._place.device.torch_device)
        if retries > self._retries:
            self._retries = retries
            self._give_up(int(RETRY_BUDGET_SHARE * self._wish.device), "the device's allocator was short of memory")
        elif peak > self._wish.device and self._is_news(saved):
            self._too_much(peak)
        elif self._guarded and self._is_news(saved) and is_larger(self.probes.largest, self._planned_for):
            self._again(f"a step saves {format_nbytes(saved)}, more than planned for")
        elif self._has_shrunk(saved):
            self._again(f"steps save {format_nbytes(self.probes.largest)} at most")
        elif sample is not None and self._duel is not None:
            other, is_over = self._duel.add(sample.total * probes.scale(sample.saved), peak)
            self._duel = None if is_over else self._duel
            self._run(other)
        elif sample is not None:
            step = self._times.add(sample, probes.scale)
            self.plan = plan.run(step, max(peak, plan.measured.peak if plan.measured is not None else 0.0))
            if not self._excess and self._times.deviate(step, plan.predicted.step):
                self._again(f"a step took {step:.1f} ms instead of {plan.predicted.step:.1f}")

    def _guard(self, scale: float) -> None:
        """Recompute all in this step where its input, `scale` times the planned one, would exceed the budget."""
        if self.plan is None or self._excess or scale * self.plan.predicted.peak <= self._wish.device:
            return
        before, rules = self._decisions, self._rules
        self._use(self.probes.least())
        self._guarded = self._switch(self._rules)
        if self._guarded:
            self.profiler.cancel()
        else:
            self._decisions, self._rules = before, rules

    def _has_shrunk(self, saved: int) -> bool:
        """Return whether many steps in a row have saved less than the plan expects."""
        size = self._sizes.shrunk_to(saved, self.probes.largest)
        if size:
            self._inputs.shrink(size / self.probes.largest)
            self.probes.shrink(size)
        return bool(size)

    def _is_news(self, saved: int) -> bool:
        """Return whether a step over the budget is news to the plan."""
        before = self.probes.largest
        self.probes.grow(saved)
        return is_news(self.probes.largest, before, excess=self._excess)

    def _too_much(self, peak: int) -> None:
        """Plan again after a step over the budget: the prediction was too low, or steps have grown."""
        assert self.plan is not None
        self._shift += underestimate(peak, self.plan.predicted.peak, self.probes.largest, self._planned_for)
        self._again(f"a step held {format_nbytes(peak)}, more than the budget")

    def _again(self, why: str) -> None:
        self._history.append(why)
        log.info("plans again: %s", why)
        try:
            self._make_plan()
        except CapacityError as refusal:
            if self.probes.largest > MAX_GROWTH * self._measured:
                self._start_again("steps have grown")
            else:
                self._make_least(refusal)

    def _start_again(self, why: str) -> None:
        """Measure again from the first step on, which recomputes all that can be."""
        self._history.append(f"{why}: measured again")
        log.info("%s", self._history[-1])
        self._forget()

    def _forget(self) -> None:
        super()._forget()
        self._duel = None
        self._rating = Rating(self.probes, self._pairs, self._ledger)
