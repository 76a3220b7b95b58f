"""Rows of a fit for the policy "auto": the planner's choice from a dry step, and what that choice needs."""

from __future__ import annotations

from actstore.base.units import format_nbytes
from actstore.errors import CapacityError, ConfigError
from actstore.inspection.fit.result import FitRow
from actstore.inspection.fit.steps import DrySteps
from actstore.plan.build import chain_of, limits_of
from actstore.plan.decisions import KEEP
from actstore.plan.plan import Plan
from actstore.plan.solver.least import least
from actstore.policy import Auto, Bits, parse_chooser
from actstore.session.planning import replan

AUTO = "auto"  # as a text alone: with the device's memory as the limit
MAX_BUDGETS = 6  # that are tried for one memory
CLOSE_SHARE = 0.99  # of the memory: a plan that needs more of it is good enough
ENOUGH = 2  # times what plain autograd saves: a budget under which a plan keeps all
ROUNDING = 1e-6  # of the least bytes, above which the solver finds a plan


class Planned:
    """A policy that plans.

    Parameters
    ----------
    limit : bytes of the device's memory; None where it is unknown
    auto : the value of the text; None for `AUTO` alone, whose plan fits into the memory
    """

    def __init__(self, text: str, limit: int | None, auto: Auto | None) -> None:
        self._text = text
        self._limit = limit
        self._auto = auto

    def row(self, steps: DrySteps) -> FitRow:
        """Return the row of the plan, and for a memory the bytes of the plan that needs least.

        Raises
        ------
        CapacityError : no plan keeps the budget that the text has
        """
        plans = _Plans(steps, self._text, self._auto)
        if self._auto is not None:
            return plans.row(plans.within(self._auto))
        assert self._limit is not None
        frugal = plans.frugal()
        best = frugal if frugal.most_bytes > self._limit else plans.largest(frugal, self._limit)
        return best._replace(frugal_bytes=frugal.most_bytes)

    def quick_row(self, steps: DrySteps) -> FitRow:
        """Return the row without its range: for a memory that of the plan that needs least.

        Raises
        ------
        CapacityError : no plan keeps the budget that the text has
        """
        plans = _Plans(steps, self._text, self._auto)
        return plans.frugal(quick=True) if self._auto is None else plans.row(plans.within(self._auto), quick=True)


class _Plans:
    """Plans from one profile."""

    def __init__(self, steps: DrySteps, text: str, auto: Auto | None) -> None:
        self._steps = steps
        self._text = text
        self.profile = steps.profile(tiles=auto is not None and auto.tiles)

    def within(self, auto: Auto) -> Plan:
        """Return the plan for a budget.

        Raises
        ------
        CapacityError : no plan keeps it; the error names the policy in tiles that needs least, and its peak
        """
        try:
            return replan(self.profile, auto)
        except CapacityError as error:
            tiled = min(self._steps.tiled(), key=lambda row: row.peak_bytes, default=None)
            if tiled is None or "tiles" not in tiled.policy:
                raise
            why = f"{error} In tiles a whole step needs {format_nbytes(tiled.peak_bytes)}: {tiled.policy!r}."
            raise CapacityError(why, **error.facts) from None

    def row(self, plan: Plan, *, quick: bool = False) -> FitRow:
        run = self._steps.quick_row if quick else self._steps.row
        return run(plan)._replace(policy=self._text, plan=plan.text, budget_bytes=plan.budget)

    def frugal(self, *, quick: bool = False) -> FitRow:
        """Return the row of the plan with the least activations, or of the one that keeps all, if that needs less."""
        found = least(chain_of(self.profile), limits_of(0.0, None, 0.0, 0.0))
        budgets = round((1 + ROUNDING) * found.device) + 1, ENOUGH * self.profile.saved + 1
        rows = [self.row(replan(self.profile, Auto(budget)), quick=quick) for budget in budgets]
        return min(rows, key=lambda row: row.most_bytes)

    def largest(self, frugal: FitRow, limit: int) -> FitRow:
        """Return the row of the plan with the largest budget whose step needs at most `limit` bytes.

        Parameters
        ----------
        frugal : row of a plan that fits
        """
        best, rows = frugal, {frugal.plan: frugal}
        assert frugal.budget_bytes is not None
        low, high = frugal.budget_bytes, None
        budget = low + limit - frugal.most_bytes
        for _ in range(MAX_BUDGETS):
            plan = replan(self.profile, Auto(budget))
            row = rows.get(plan.text)
            if row is None:
                row = rows[plan.text] = self.row(plan)
            if row.most_bytes <= limit:
                best, low = row._replace(budget_bytes=budget), budget
                if row.most_bytes >= CLOSE_SHARE * limit or all(each.decision == KEEP for each in plan.rows):
                    break
            else:
                high = budget
            budget += limit - row.most_bytes
            if high is not None and not low < budget < high:
                budget = (low + high) // 2
        return best


def row_of(steps: DrySteps, text: str, limit: int | None) -> FitRow:
    """Return the row of any policy.

    Raises
    ------
    CapacityError : no plan keeps the budget that the text has
    """
    found = planned(text, limit)
    return steps.row(text) if found is None else found.row(steps)


def quick_row_of(steps: DrySteps, text: str, limit: int | None) -> FitRow:
    """Return the row of any policy without its range, and of `AUTO` with the plan that needs least.

    Raises
    ------
    CapacityError : no plan keeps the budget that the text has
    """
    found = planned(text, limit)
    return steps.quick_row(text) if found is None else found.quick_row(steps)


def planned(text: str, limit: int | None) -> Planned | None:
    """Return a policy that plans; None for any other text.

    Raises
    ------
    ConfigError : the policy needs a budget or a limit; or it chooses by the values of tensors
    """
    if text.strip() == AUTO:
        if limit is None:
            raise ConfigError(f"policy={text!r}: needs a memory or a budget. Give memory=, or write auto(20GiB).")
        return Planned(text, limit, None)
    chooser = parse_chooser(text)
    if isinstance(chooser, Bits) or (chooser is not None and chooser.max_noise):
        raise ConfigError(
            f"policy={text!r}: chooses by the errors of payloads, and a dry step has no values. Write auto(20GiB) for "
            "a plan without losses, or make one with `actstore plan`."
        )
    return None if chooser is None else Planned(text, limit, chooser)
