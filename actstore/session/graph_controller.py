"""The policy "auto" of a compiled model: its graphs follow a plan, and the store keeps what they save."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module

from actstore.compiled.budget.plan import GraphPlan, RegionBudget
from actstore.policy import Policy, Rules
from actstore.store.tierset import TierSet


class GraphController:
    """The controller of a store whose model was compiled within a budget."""

    name = "auto"
    gauge = None

    def __init__(self, budget: RegionBudget) -> None:
        self._budget = budget
        self._rules = Rules([])

    @property
    def plan(self) -> GraphPlan | None:
        """Plan of the compiled model; None until its first step."""
        return self._budget.plan

    def next(self, place: TierSet, modules: Iterable[tuple[str, Module]], /) -> Policy:
        """Return rules that keep all that the graphs save: what leaves does so inside of them."""
        plan = self.plan
        place.engine.resize(plan.window if plan is not None and plan.window else self._budget.windows[0])
        return self._rules

    def begin(self) -> None:
        """Do nothing: there is nothing to measure."""

    def watching(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return the pack hook as it is."""
        return pack

    def end_forward(self, error: BaseException | None, /) -> None:
        """Do nothing: the plan stays as it is."""

    def state(self) -> dict[str, Any]:
        """Return that no plan was measured: the graphs of another process have their own, and all plans are exact."""
        return {"plan": None}

    def resume(self, state: dict[str, Any], place: TierSet, /) -> str:
        """Go on: nothing is planned again."""
        return ""

    def close(self) -> None:
        """Do nothing."""
