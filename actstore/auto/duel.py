"""Duel: steps of a plan and of a policy in one line, by turns. The faster one stays."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actstore.plan.plan import Plan

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
