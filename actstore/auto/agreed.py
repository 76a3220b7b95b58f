"""The controller of one rank of a group that runs one plan.

While steps are measured, each rank waits for the decisions of the next step. The first rank of those with the same
model, the leader, makes them from the measurements of all. With a plan no rank waits any more: ranks report, the leader
proposes another plan, all accept it, and they change to it at one step, or none does.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from actstore.auto.board import Board
from actstore.auto.joint import JointPlanner
from actstore.auto.links import measure_links
from actstore.auto.profiler import Profiler, Sample
from actstore.auto.saved_plan import SavedPlan, runs_again
from actstore.auto.slowest import slowest_links, tightest_wish
from actstore.auto.watch import StepTimes
from actstore.base.ledger import Ledger
from actstore.errors import ActstoreError, CapacityError, StateError
from actstore.model.names import named_modules
from actstore.model.units import digest_of
from actstore.plan.build import text_of
from actstore.plan.plan import Plan
from actstore.plan.solver.chain import Links
from actstore.plan.wish import Wish
from actstore.policy import Rules
from actstore.store.tierset import TierSet

log = logging.getLogger("actstore")

ROUND_STEPS = 16  # from a report to the change of plans; in between, at these steps of the round:
PROPOSE_STEP, ACCEPT_STEP, CONFIRM_STEP = 4, 8, 12


class AgreedController:
    """The policy of one store, step by step, agreed with the stores of the other ranks. Not thread-safe.

    Attributes
    ----------
    plan : the plan that runs; None while steps are measured

    Parameters
    ----------
    board : of the group
    sets_window : whether the plan sets the engine's window
    """

    name = "auto"

    def __init__(self, model: Module, ledger: Ledger, wish: Wish, board: Board, *, sets_window: bool) -> None:
        self.plan: Plan | None = None
        self.profiler = Profiler(model, ledger)
        self._model, self._ledger, self._wish, self._board = model, ledger, wish, board
        self._loaded: SavedPlan | None = None  # that this rank has loaded, until the ranks have met
        self._sets_window = sets_window
        ledger.budget.set(wish.device)
        self._modules = named_modules(model)
        self._place: TierSet | None = None
        self._planner: JointPlanner | None = None  # of the leader
        self._links: Links | None = None
        self._epoch = 0  # number of the model's structure
        self._peers: list[int] = []  # ranks with the same model, the leader first
        self._step = 0  # number of the running step
        self._plans = 0  # number of plans so far,
        self._since = 0  # and the step that began to run the last one
        self._next: Plan | None = None  # proposed for the end of the round
        self._stayed: Plan | None = None  # the leader's last proposal, which not all ranks accepted in time
        self._broken: Callable[[], Exception] | None = None  # why the group agrees no more
        self._decisions: dict[str, str] = {}
        self._rules = Rules.parse(text_of({}))
        self._times = StepTimes()
        self._forget()

    @property
    def gauge(self) -> Profiler:
        """The profiler that measures the store's own work."""
        return self.profiler

    # -- the session's calls ------------------------------------------------------------------------------------------

    def next(self, place: TierSet, modules: Iterable[tuple[str, Module]]) -> Rules:
        """Return the policy of the step that begins now. An evaluation runs as the last step did.

        Raises
        ------
        CapacityError : no plan fits into the budget of the ranks; the error names the least possible
        StateError : a rank is missing in a step that measures; the error names it
        """
        self._place = place
        self._note(self.profiler.finish())
        if not torch.is_grad_enabled():
            return self._rules
        found = list(modules)
        if found != self._modules:
            self._modules = found
            self._start_again()
        self._step += 1
        if self.plan is None:
            self._measure(place)
        elif self._broken is None:
            try:
                self._agree(place, self.plan)
            except (RuntimeError, ActstoreError) as error:
                if self._next is not None:  # the other ranks may run it
                    raise StateError(
                        f"Auto(group): step {self._step}: whether another plan runs from this round on is unknown: "
                        f"{error}. Start all ranks again."
                    ) from error
                self._broken = partial(StateError, str(error))
                warnings.warn(
                    f"Auto(group): step {self._step}: the ranks cannot agree on another plan: {error}. "
                    "This rank keeps the plan that it has.",
                    RuntimeWarning,
                    stacklevel=4,
                )
        return self._rules

    def close(self) -> None:
        """End the measurements, as the store is closed."""
        if self._planner is not None:
            self._planner.probes.close()

    def state(self) -> dict[str, Any]:
        """Return what `resume` takes, as JSON values."""
        if self.plan is None:
            return {"plan": None}
        return {
            "plan": self.plan.to_dict(),
            "step": self._step,
            "wish": asdict(self._wish),
            "ranks": len(self._board.ranks),
            "times": self._times.state(),
            "planner": None if self._planner is None else self._planner.state(),
        }

    def resume(self, state: dict[str, Any], place: TierSet) -> str:
        """Go on as the controller that gave the state, if all ranks have its plan when they enter their stores again.

        Returns
        -------
        str : why the group measures again; empty where the plan is taken over
        """
        if self._step:
            self._start_again()
        self.profiler.cancel()
        device, ranks = place.device.torch_device, len(self._board.ranks)
        self._loaded = SavedPlan.read(state, self._model, device, self._wish, ranks)
        return self._loaded.why and f"{self._loaded.why}: the group measures again"

    def watching(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return the pack hook of an entry, given the store's own: this policy leaves it as it is."""
        return pack

    def begin(self) -> None:
        """Begin the step, and measure it where the group needs that."""
        if not torch.is_grad_enabled():
            return
        if self.plan is not None:
            self._times.begin()
        if self._times.wanted:
            assert self._place is not None
            self.profiler.begin(self._place.device, self._decisions)

    def end_forward(self, error: BaseException | None) -> None:
        """End the forward, which may have failed with `error`: the other ranks can read that."""
        if error is None:
            self.profiler.end_forward()
            return
        self.profiler.cancel()
        try:
            self._board.put(self._key("failed", self._board.rank), f"{type(error).__name__} in step {self._step}")
        except RuntimeError as unreachable:
            log.warning("the other ranks cannot be told of an error: %s", unreachable)

    # -- what this rank measures --------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._samples: dict[str, Any] = {}  # by step
        self._peak = self._saved = 0

    def _note(self, sample: Sample | None) -> None:
        """Note the step that has ended."""
        self._peak = max(self._peak, self._ledger.peak)
        self._saved = max(self._saved, sum(account.saved for account in self._ledger.accounts()))
        if sample is None or not sample.backward:  # an evaluation
            return
        self._samples[str(self._step)] = asdict(sample)
        if self.plan is not None:
            step = self._times.add(sample, lambda _: 1.0)
            before = 0.0 if self.plan.measured is None else self.plan.measured.peak
            self.plan = self.plan.run(step, max(self._peak, before))

    def _report(self) -> dict[str, Any]:
        """Return the report of the steps since the last one."""
        values = {"samples": self._samples, "peak": self._peak, "saved": self._saved}
        self._forget()
        bound = sorted(self.profiler.separability.bound)
        return {**values, "writers": sorted(self.profiler.writers), "bound": bound}

    def _start_again(self) -> None:
        """Measure again from the first step on, as the model's modules have changed on all ranks."""
        self.close()
        self.profiler.look()
        self._epoch += 1
        self._peers, self._planner, self.plan, self._next, self._step = [], None, None, None, 0
        self._stayed = None
        self._forget()
        self._times.clear()

    # -- steps that measure: ranks wait for each other ----------------------------------------------------------------

    def _key(self, what: str, *numbers: int) -> str:
        return "/".join([str(self._epoch), what, *map(str, numbers)])

    def _measure(self, place: TierSet) -> None:
        """Run the next step that measures, or the first plan, as the leader settles it."""
        if self._broken is not None:
            raise self._broken()
        try:
            if not self._peers:
                self._meet(place)
                if self.plan is not None:
                    return
            self._follow(self._settled(place))
        except ActstoreError as error:
            self._broken = partial(type(error), str(error), **error.facts)
            raise
        except RuntimeError as error:
            raise StateError(
                f"Auto(group): step {self._step}: the key-value store of the process group does not answer: {error}. "
                "The process that keeps it, mostly that of rank 0, has ended: start all ranks again."
            ) from error

    def _meet(self, place: TierSet) -> None:
        """Share limits and links with all ranks of the group, and find those with the same model."""
        board = self._board
        if self._links is None:
            self._links = measure_links(place, host=self._wish.host != 0, disk=self._wish.disk != 0)
        mine: dict[str, Any] = {
            "model": digest_of(self._model),
            "wish": asdict(self._wish),
            "links": asdict(self._links),
            "saved": None if self._loaded is None else self._loaded.outline(),
        }
        board.put(self._key("hello", board.rank), mine)
        names = [self._key("hello", rank) for rank in board.ranks]
        self._settle("met", lambda: {"met": True} if board.has(names) else None, "hello", board.ranks)
        hellos = dict(zip(board.ranks, map(board.read, names), strict=True))
        self._peers = [rank for rank, hello in hellos.items() if hello["model"] == mine["model"]]
        wish = tightest_wish([Wish(**hellos[rank]["wish"]) for rank in self._peers])
        self._ledger.budget.set(wish.device)
        if self._peers[0] == board.rank:
            links = slowest_links([Links(**hellos[rank]["links"]) for rank in self._peers])
            self._planner = JointPlanner(self._model, self.profiler, wish, links)
        if runs_again({rank: hellos[rank]["saved"] for rank in self._peers}):
            self._take_over()
        self._loaded = None

    def _take_over(self) -> None:
        """Run the plan of the loaded state, which all ranks have."""
        assert self._loaded is not None
        assert self._loaded.plan is not None
        state, self._step = self._loaded.state, self._loaded.state["step"] + 1
        if self._planner is not None:
            self._planner.resume(state["planner"])
        self._run(self._loaded.plan)
        self._times.resume(state["times"])

    def _settled(self, place: TierSet) -> dict[str, Any]:
        """Return what the leader settles for this step, from the measurements of all."""
        board, leader = self._board, self._peers[0]
        names = [self._key("measured", self._step, rank) for rank in self._peers]
        board.put(self._key("measured", self._step, board.rank), self._report())

        def find() -> Any:
            if self._planner is None:
                return board.read(self._key("step", leader, self._step))
            return self._proposal(self._planner, place, names) if board.has(names) else None

        settled = self._settle(f"step/{leader}/{self._step}", find, f"measured/{self._step}", self._peers)
        if self._planner is not None:  # all ranks have read what was settled for the step before
            board.drop([*names, self._key("step", leader, self._step - 1)])
        return settled

    def _proposal(self, planner: JointPlanner, place: TierSet, names: list[str]) -> dict[str, Any]:
        try:
            proposed = planner.propose(place, [self._board.read(name) for name in names])
        except Exception as error:
            self._error = error
            least = error.facts.get("least") if isinstance(error, CapacityError) else None
            return {"error": str(error), "least": least}
        return {"plan": proposed.to_dict()} if isinstance(proposed, Plan) else {"decisions": proposed}

    def _settle(self, name: str, find: Callable[[], Any], sent: str, ranks: list[int]) -> dict[str, Any]:
        """Return what the ranks settle under a name: what one of them finds, or which ranks are missing.

        Parameters
        ----------
        sent : the values that all `ranks` write before

        Raises
        ------
        StateError : ranks were missing for `wait_s` seconds; all ranks that come here raise it
        """
        board, name = self._board, f"{self._epoch}/{name}"
        found = board.wait(find)
        if found is None:
            late = [rank for rank in ranks if not board.has([f"{self._epoch}/{sent}/{rank}"])]
            if not late:  # the leader has all, and plans
                found, late = board.wait(find), ranks[:1]
        settled: dict[str, Any] = board.settle(name, found if found is not None else {"late": late})
        if "late" not in settled:
            return settled
        who = ", ".join(map(self._described, settled["late"]))
        raise StateError(
            f"Auto(group): step {self._step}: nothing came from rank {who}, and the group has no plan yet. All ranks "
            "must enter their stores equally often: look at that rank's error, and start all ranks again. Where it "
            "is slow, give Auto(wait_s=) more seconds.",
            ranks=settled["late"],
            step=self._step,
        )

    def _described(self, rank: int) -> str:
        failed = self._board.read(self._key("failed", rank))
        return f"{rank} ({failed})" if failed else str(rank)

    def _follow(self, settled: dict[str, Any]) -> None:
        if "error" in settled:
            if self._planner is not None:
                raise self._error
            text = f"rank {self._peers[0]} planned for the group: {settled['error']}"
            if settled["least"] is None:
                raise StateError(text)
            raise CapacityError(text, least=settled["least"])
        if "plan" in settled:
            self._run(Plan.from_dict(settled["plan"]))
        else:
            self._use(settled["decisions"])

    # -- steps of a plan: no rank waits -------------------------------------------------------------------------------

    def _agree(self, place: TierSet, plan: Plan) -> None:
        """Do this rank's part at this step of a round."""
        board, (number, step) = self._board, divmod(self._step - self._since, ROUND_STEPS)
        before, now = (self._key("round", self._peers[0], self._plans, n) for n in (number - 1, number))
        reports, accepts = ([f"{now}/{what}/{rank}" for rank in self._peers] for what in ("report", "accepts"))
        mine = self._peers.index(board.rank)
        if step == 0:
            proposed = self._next
            changes = proposed is not None and board.settle(f"{before}/end", "stay") == "go"
            self._stayed, self._next = proposed, None
            if proposed is not None and changes:
                self._run(proposed)
                return
            board.put(reports[mine], self._report())
        elif self._planner is None:
            if step == ACCEPT_STEP and (values := board.read(f"{now}/plan")) is not None:
                self._next = Plan.from_dict(values)
                board.put(accepts[mine], True)
        elif step == PROPOSE_STEP and board.has(reports):
            self._next = self._stayed or self._planner.review(place, plan, [board.read(name) for name in reports])
            if self._next is not None:
                board.put(f"{now}/plan", self._next.to_dict())
            board.drop([*reports, f"{before}/plan", f"{before}/end", *(f"{before}/accepts/{r}" for r in self._peers)])
        elif step == CONFIRM_STEP and self._next is not None and board.has(accepts[1:]):
            board.settle(f"{now}/end", "go")

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _use(self, decisions: dict[str, str]) -> None:
        self._decisions = decisions
        self._rules = Rules.parse(text_of(decisions))

    def _run(self, plan: Plan) -> None:
        """Run a plan from this step on."""
        assert self._place is not None
        self.plan, self._since = plan, self._step
        self._plans += 1
        self._stayed = None
        self._use(plan.decisions)
        self._ledger.budget.set(max(plan.budget, int(plan.predicted.peak)))
        if plan.window is not None and self._sets_window:
            self._place.engine.resize(plan.window)
        self._forget()
        self._times.clear()
        log.info("plan of the group from step %d on: %s", self._step, plan.certificate)
