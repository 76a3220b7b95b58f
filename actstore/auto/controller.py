"""The controller that finds a policy for a budget during training. Every step on the way is an ordinary training step.

It runs and measures the steps. A board decides them: `LocalBoard` for one process, `GroupBoard` for ranks that run one
plan. Steps run the model's modules, or, once it is compiled within a budget, its graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from actstore.auto.local import LocalBoard
from actstore.auto.profiler import Profiler
from actstore.auto.steps import Steps
from actstore.errors import CapacityError
from actstore.plan.plan import Plan
from actstore.policy import Rules
from actstore.store.tierset import TierSet

if TYPE_CHECKING:
    from actstore.auto.graph import GraphSteps
    from actstore.auto.group import GroupBoard
    from actstore.compiled.budget.plan import GraphPlan


class AutoController:
    """The policy of one store, step by step. Not thread-safe: the session calls it under its lock.

    Attributes
    ----------
    board : what decides about steps of modules; None once the model runs in graphs
    graph : steps of the compiled model; None where it is not compiled within a budget
    """

    name = "auto"
    choice = None

    def __init__(self, steps: Steps, board: LocalBoard | GroupBoard) -> None:
        self.board: LocalBoard | GroupBoard | None = board
        self.graph: GraphSteps | None = None
        self._steps = steps

    @property
    def plan(self) -> Plan | None:
        """The plan that runs; None while steps are measured, and for a compiled model."""
        return self._steps.plan if self.graph is None else None

    @property
    def graph_plan(self) -> GraphPlan | None:
        """The plan of a compiled model; None before its first step."""
        return None if self.graph is None else self.graph.plan

    @property
    def gauge(self) -> Profiler:
        """The profiler that measures the store's own work."""
        return self._steps.profiler

    def next(self, place: TierSet, modules: Iterable[tuple[str, Module]]) -> Rules:
        """Return the policy of the step that begins now.

        Raises
        ------
        CapacityError : no plan fits into the budget; the error names the least possible, where known
        StateError : a rank of the group is missing in a step that measures; the error names it
        """
        if self.board is not None:
            self._steps.place = place
            why = ""
            try:
                self._next_eager(self.board, modules)
                if self.graph is None or self._steps.plan is None:
                    return self._steps.rules
            except CapacityError as error:
                if self.graph is None:
                    raise
                why = str(error)  # graphs need less than eager steps
            assert isinstance(self.board, LocalBoard)
            self.graph.start_after(self.board.planner.probes.profile(place.device.torch_device), why)
            self._end_eager()
        assert self.graph is not None
        return self.graph.next(place)

    def _next_eager(self, board: LocalBoard | GroupBoard, modules: Iterable[tuple[str, Module]]) -> None:
        sample = self._steps.profiler.finish()
        board.next(sample if sample is not None and sample.backward else None, modules)  # not of an evaluation

    def begin(self) -> None:
        """Begin the step, and measure it where the board needs that."""
        if self.board is None or not torch.is_grad_enabled():
            return
        steps = self._steps
        if steps.plan is not None:
            steps.times.begin()
        if steps.times.wanted and self.board.measures:
            steps.profiler.begin(steps.place.device, steps.decisions)
        self.board.begin()

    def watching(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return the pack hook of an entry, given the store's own: this policy leaves it as it is."""
        return pack

    def end_forward(self, error: BaseException | None) -> None:
        """End the forward, which may have failed with `error`."""
        if self.board is None:
            return
        if error is None:
            self._steps.profiler.end_forward()
        else:
            self._steps.profiler.cancel()
        self.board.end_forward(error)

    @property
    def retries(self) -> bool:
        """True where a step that ran out of memory may run again with less: graphs and ranks of a group do not."""
        return isinstance(self.board, LocalBoard)

    def tightened(self, error: BaseException) -> bool:
        """Plan for less where `error` means that memory ran out; return whether the step may run again."""
        return isinstance(self.board, LocalBoard) and self.board.tightened(error)

    def state(self) -> dict[str, Any]:
        """Return what `resume` takes, as JSON values. Another process has graphs and a plan of them of its own."""
        if self.graph is not None:
            return {"plan": None, "noise": self.graph.noise}
        assert self.board is not None
        return self.board.state()

    def resume(self, state: dict[str, Any], place: TierSet) -> str:
        """Go on as the controller that gave the state. Return why steps are measured or planned again; empty if not."""
        if self.board is None:
            return ""
        if self.graph is None:
            return self.board.resume(state, place)
        if (noise := state.get("noise")) is None:
            return "eager steps were still measured when the state was saved: measured again"
        self.graph.resume(noise)
        self._end_eager()
        return ""

    def close(self) -> None:
        """End the measurements, as the store is closed."""
        if self.board is not None:
            self.board.close()

    # -- compiled models ----------------------------------------------------------------------------------------------

    def compile(self, graph: GraphSteps) -> None:
        """Run the graphs of the model from now on, or, where payloads may lose, once eager steps have shown the effect.

        A model that is compiled again keeps what was measured.
        """
        before, self.graph = self.graph, graph
        if self.board is None or not graph.max_noise:
            graph.start(None if before is None else before.lossy)
            self._end_eager()

    def _end_eager(self) -> None:
        self.close()
        self.board = None
