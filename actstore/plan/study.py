"""Alternatives to a plan: its profile under other budgets, and other decisions for one unit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

from actstore.plan.build import chain_of, limits_of
from actstore.plan.solver.chain import LayerChain
from actstore.plan.solver.solve import pareto
from actstore.plan.solver.timeline import Evaluation, evaluate

if TYPE_CHECKING:
    from actstore.plan.values import PlanValues


@dataclass(frozen=True)
class Budget:
    """A budget in bytes, the step in ms that the best plan under it takes, and its decisions by unit."""

    device: float
    step: float
    decisions: tuple[str, ...]


@dataclass(frozen=True)
class Other:
    """Alternative decision for one unit, with the remaining units as planned.

    Attributes
    ----------
    slower : ms that the step takes longer; below zero where it is faster
    over : missing bytes of device memory
    breaks : the limits that the decision exceeds: "device", "host", "disk", "error"
    """

    decision: str
    slower: float
    over: float
    breaks: tuple[str, ...]


class Study:
    """Questions to the solver about a plan, answered lazily. Not thread-safe."""

    def __init__(self, plan: PlanValues) -> None:
        self._plan = plan
        max_noise = plan.limits.get("max_noise") or 0.0
        self.chain: LayerChain = chain_of(plan.profile, max_noise, tiles=bool(plan.limits.get("tiles")))
        device = plan.limits.get("device")
        self.limits = limits_of(
            plan.budget if device is None else device,
            plan.limits.get("host"),
            plan.limits.get("disk"),
            max_noise,
        )

    @cached_property
    def choice(self) -> tuple[int, ...] | None:
        """Option indices of the plan; None where its profile lacks them."""
        found = []
        for row, layer in zip(self._plan.rows, self.chain.layers, strict=False):
            at = next((i for i, option in enumerate(layer.options) if option.decision == row.decision), None)
            if row.unit != layer.name or at is None:
                return None
            found.append(at)
        return tuple(found) if len(found) == len(self._plan.rows) == len(self.chain.layers) else None

    def front(self, points: int, time_limit: float = 0.5) -> tuple[Budget, ...]:
        """Return budgets from the least possible to the largest that is of use, each with a faster step than the last.

        Parameters
        ----------
        time_limit : seconds for each of them

        Raises
        ------
        CapacityError : a limit other than the device's cannot be kept
        ConfigError : the plan has no units; or the solver is needed, and scipy is not installed
        """
        beyond = self._plan.budget - self.limits.device  # bytes that a step held beyond the prediction
        return tuple(
            Budget(
                point.device + beyond,
                point.solution.evaluation.total,
                tuple(
                    layer.options[o].decision for layer, o in zip(self.chain.layers, point.solution.choice, strict=True)
                ),
            )
            for point in pareto(self.chain, replace(self.limits, device=inf), points, time_limit=time_limit, gap=0.005)
        )

    def others(self, at: int) -> list[Other]:
        """Return the effect of each other option of a unit, the fastest first; empty without `choice`."""
        choice = self.choice
        if choice is None:
            return []
        planned = self._evaluate(choice)
        found = []
        for o, option in enumerate(self.chain.layers[at].options):
            if o != choice[at]:
                new = self._evaluate((*choice[:at], o, *choice[at + 1 :]))
                over = max((b.needed - b.allowed for b in new.broken if b.limit == "device"), default=0.0)
                limits = tuple(breach.limit for breach in new.broken)
                found.append(Other(option.decision, new.total - planned.total, over, limits))
        return sorted(found, key=lambda other: (other.slower, other.over))

    def _evaluate(self, choice: tuple[int, ...]) -> Evaluation:
        return evaluate(self.chain, choice, self.limits)
