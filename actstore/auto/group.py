"""Decisions of ranks that run one plan.

While steps are measured, each rank waits for the decisions of the next step. The first rank of those with the same
model, the leader, makes them from the measurements of all. With a plan no rank waits any more: ranks report, the leader
proposes another plan, all accept it, and they change to it at one step, or none does.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch.nn import Module

from actstore.auto.group_store import GroupStore
from actstore.auto.links import measure_links
from actstore.auto.planner import GroupPlanner, changed, slowest_links, tightest_grants, unfit
from actstore.auto.sample import Sample
from actstore.auto.steps import Steps
from actstore.errors import ActstoreError, CapacityError, StateError
from actstore.model.units import digest_of
from actstore.plan.plan import Plan
from actstore.plan.solver.chain import Links
from actstore.plan.values import Grants
from actstore.store.tierset import TierSet

log = logging.getLogger("actstore")


@dataclass(frozen=True)
class SavedPlan:
    """Plan of a state that one rank has loaded.

    Attributes
    ----------
    plan : None where the rank cannot run it
    state : of the controller that saved it; empty without a plan
    why : the reason why the rank cannot run it
    """

    plan: Plan | None
    state: dict[str, Any]
    why: str

    @classmethod
    def read(cls, state: dict[str, Any], model: Module, device: torch.device, grants: Grants, ranks: int) -> SavedPlan:
        """Return the plan of a state, for a rank with these limits in a group of `ranks` ranks."""
        plan = None if state["plan"] is None else Plan.from_dict(state["plan"])
        why = unfit(plan, model, device)
        if not why and state["ranks"] != ranks:
            why = f"the group has {ranks} ranks, before {state['ranks']}"
        if not why and (before := Grants(**state["grants"])) != grants:
            why = changed(before, grants)
        return cls(None, {}, why) if why else cls(plan, state, "")

    def outline(self) -> dict[str, Any]:
        """Return what the other ranks need to know of it."""
        if self.plan is None:
            return {"plan": "", "step": 0, "plans": False, "why": self.why}
        text = json.dumps(replace(self.plan, measured=None).to_dict())  # each rank has a measurement of its own
        digest = sha256(text.encode()).hexdigest()[:16]
        return {"plan": digest, "step": self.state["step"], "plans": self.state["planner"] is not None, "why": ""}


def runs_again(outlines: Mapping[int, dict[str, Any] | None]) -> bool:
    """Return whether all ranks can run the plan that they have loaded; False where they measure.

    Parameters
    ----------
    outlines : by rank, the one that plans first; None where a rank has loaded nothing

    Raises
    ------
    StateError : the ranks have loaded different states; the error names two of them
    """
    for rank, outline in outlines.items():
        if outline is not None and outline["why"]:
            log.warning("Auto(group): the group measures again, because of rank %d: %s", rank, outline["why"])
            return False
    (leader, wanted), *others = outlines.items()
    for rank, outline in others:
        if _named(outline) != _named(wanted):
            raise StateError(
                f"load_state_dict(): rank {rank} has loaded {_named(outline)}, and rank {leader} {_named(wanted)}. "
                "Load the states of one checkpoint on all ranks, or on none.",
                ranks=[leader, rank],
            )
    if wanted is not None and not wanted["plans"]:
        log.warning("Auto(group): the group measures again: rank %d has loaded the state of another rank", leader)
        return False
    return wanted is not None


def _named(outline: dict[str, Any] | None) -> str:
    return "no state" if outline is None else f"plan {outline['plan']} of step {outline['step']}"


ROUND_STEPS = 16  # from a report to the change of plans; in between, at these steps of the round:
PROPOSE_STEP, ACCEPT_STEP, CONFIRM_STEP = 4, 8, 12


class GroupBoard:
    """The board of ranks that run one plan: a rank's part in what all decide.

    Parameters
    ----------
    shared : the values that the ranks write for each other
    """

    measures = True

    def __init__(self, steps: Steps, grants: Grants, shared: GroupStore) -> None:
        self._steps, self._grants, self._shared = steps, grants, shared
        self._loaded: SavedPlan | None = None  # that this rank has loaded, until the ranks have met
        steps.ledger.budget.set(grants.device)
        self._planner: GroupPlanner | None = None  # of the leader
        self._links: Links | None = None
        self._epoch = 0  # number of the model's structure
        self._peers: list[int] = []  # ranks with the same model, the leader first
        self._step = 0  # number of the running step
        self._plans = 0  # number of plans so far,
        self._since = 0  # and the step that began to run the last one
        self._next: Plan | None = None  # proposed for the end of the round
        self._stayed: Plan | None = None  # the leader's last proposal, which not all ranks accepted in time
        self._broken: Callable[[], Exception] | None = None  # why the group agrees no more
        self._forget()

    # -- the controller's calls ---------------------------------------------------------------------------------------

    def next(self, sample: Sample | None, modules: Iterable[tuple[str, Module]]) -> None:
        """Decide the step that begins now. An evaluation runs as the last step did.

        Raises
        ------
        CapacityError : no plan fits into the budget of the ranks; the error names the least possible
        StateError : a rank is missing in a step that measures; the error names it
        """
        self._note(sample)
        if not torch.is_grad_enabled():
            return
        if self._steps.have_changed(modules):
            self._start_again()
        self._step += 1
        plan = self._steps.plan
        if plan is None:
            self._measure()
        elif self._broken is None:
            try:
                self._agree(plan)
            except (RuntimeError, ActstoreError) as error:
                if self._next is not None:  # the other ranks may run it
                    raise StateError(
                        f"Auto(group): step {self._step}: the other ranks may run another plan from this round on: "
                        f"{error}. Restart all ranks."
                    ) from error
                self._broken = partial(StateError, str(error))
                warnings.warn(
                    f"Auto(group): step {self._step}: the ranks cannot agree on another plan: {error}. "
                    "This rank keeps its plan.",
                    RuntimeWarning,
                    stacklevel=6,
                )

    def begin(self) -> None:
        """Begin the step."""

    def close(self) -> None:
        """End the measurements, as the store is closed."""
        if self._planner is not None:
            self._planner.probes.close()

    def state(self) -> dict[str, Any]:
        """Return what `resume` takes, as JSON values."""
        plan = self._steps.plan
        if plan is None:
            return {"plan": None}
        return {
            "plan": plan.to_dict(),
            "step": self._step,
            "grants": asdict(self._grants),
            "ranks": len(self._shared.ranks),
            "times": self._steps.times.state(),
            "planner": None if self._planner is None else self._planner.state(),
        }

    def resume(self, state: dict[str, Any], place: TierSet) -> str:
        """Go on as the board that gave the state, if all ranks have its plan when they enter their stores again.

        Returns
        -------
        str : why the group measures again; empty where the plan is taken over
        """
        if self._step:
            self._start_again()
        self._steps.profiler.cancel()
        device, ranks = place.device.torch_device, len(self._shared.ranks)
        self._loaded = SavedPlan.read(state, self._steps.model, device, self._grants, ranks)
        return self._loaded.why and f"{self._loaded.why}: the group measures again"

    def end_forward(self, error: BaseException | None) -> None:
        """End the forward, which may have failed with `error`: the other ranks can read that."""
        if error is None:
            return
        try:
            self._shared.put(self._key("failed", self._shared.rank), f"{type(error).__name__} in step {self._step}")
        except RuntimeError as unreachable:
            log.warning("an error could not be reported to the other ranks: %s", unreachable)

    # -- what this rank measures --------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._samples: dict[str, Any] = {}  # by step
        self._peak = self._saved = 0

    def _note(self, sample: Sample | None) -> None:
        """Note the step that has ended."""
        self._peak = max(self._peak, self._steps.ledger.peak)
        self._saved = max(self._saved, sum(account.saved for account in self._steps.ledger.accounts()))
        if sample is None:
            return
        self._samples[str(self._step)] = asdict(sample)
        if (plan := self._steps.plan) is not None:
            step = self._steps.times.add(sample, lambda _: 1.0)
            before = 0.0 if plan.measured is None else plan.measured.peak
            self._steps.plan = plan._ran(step, max(self._peak, before))

    def _report(self) -> dict[str, Any]:
        """Return the report of the steps since the last one."""
        values = {"samples": self._samples, "peak": self._peak, "saved": self._saved}
        self._forget()
        bound = sorted(self._steps.profiler.separability.bound)
        return {**values, "writers": sorted(self._steps.profiler.writers), "bound": bound}

    def _start_again(self) -> None:
        """Measure again from the first step on, as the model's modules have changed on all ranks."""
        self.close()
        self._steps.forget()
        self._epoch += 1
        self._peers, self._planner, self._next, self._stayed, self._step = [], None, None, None, 0
        self._forget()

    # -- steps that measure: ranks wait for each other ----------------------------------------------------------------

    def _key(self, what: str, *numbers: int) -> str:
        return "/".join([str(self._epoch), what, *map(str, numbers)])

    def _measure(self) -> None:
        """Run the next step that measures, or the first plan, as the leader settles it."""
        if self._broken is not None:
            raise self._broken()
        try:
            if not self._peers:
                self._meet()
                if self._steps.plan is not None:
                    return
            self._follow(self._settled())
        except ActstoreError as error:
            self._broken = partial(type(error), str(error), **error.facts)
            raise
        except RuntimeError as error:
            raise StateError(
                f"Auto(group): step {self._step}: the key-value store of the process group does not answer: {error}. "
                "The process that hosts it, usually rank 0, has ended: restart all ranks."
            ) from error

    def _meet(self) -> None:
        """Share limits and links with all ranks of the group, and find those with the same model."""
        shared = self._shared
        if self._links is None:
            self._links = measure_links(self._steps.place, host=self._grants.host != 0, disk=self._grants.disk != 0)
        mine: dict[str, Any] = {
            "model": digest_of(self._steps.model),
            "grants": asdict(self._grants),
            "links": asdict(self._links),
            "saved": None if self._loaded is None else self._loaded.outline(),
        }
        shared.put(self._key("hello", shared.rank), mine)
        names = [self._key("hello", rank) for rank in shared.ranks]
        self._settle("met", lambda: {"met": True} if shared.has(names) else None, "hello", shared.ranks)
        hellos = dict(zip(shared.ranks, map(shared.read, names), strict=True))
        self._peers = [rank for rank, hello in hellos.items() if hello["model"] == mine["model"]]
        grants = tightest_grants([Grants(**hellos[rank]["grants"]) for rank in self._peers])
        self._steps.ledger.budget.set(grants.device)
        if self._peers[0] == shared.rank:
            links = slowest_links([Links(**hellos[rank]["links"]) for rank in self._peers])
            self._planner = GroupPlanner(self._steps.model, self._steps.profiler, grants, links)
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
        self._steps.times.resume(state["times"])

    def _settled(self) -> dict[str, Any]:
        """Return what the leader settles for this step, from the measurements of all."""
        shared, leader = self._shared, self._peers[0]
        names = [self._key("measured", self._step, rank) for rank in self._peers]
        shared.put(self._key("measured", self._step, shared.rank), self._report())

        def find() -> Any:
            if self._planner is None:
                return shared.read(self._key("step", leader, self._step))
            return self._proposal(self._planner, names) if shared.has(names) else None

        settled = self._settle(f"step/{leader}/{self._step}", find, f"measured/{self._step}", self._peers)
        if self._planner is not None:  # all ranks have read what was settled for the step before
            shared.drop([*names, self._key("step", leader, self._step - 1)])
        return settled

    def _proposal(self, planner: GroupPlanner, names: list[str]) -> dict[str, Any]:
        try:
            proposed = planner.propose(self._steps.place, [self._shared.read(name) for name in names])
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
        shared, name = self._shared, f"{self._epoch}/{name}"
        found = shared.wait(find)
        if found is None:
            late = [rank for rank in ranks if not shared.has([f"{self._epoch}/{sent}/{rank}"])]
            if not late:  # the leader has all, and plans
                found, late = shared.wait(find), ranks[:1]
        settled: dict[str, Any] = shared.settle(name, found if found is not None else {"late": late})
        if "late" not in settled:
            return settled
        who = ", ".join(map(self._described, settled["late"]))
        raise StateError(
            f"Auto(group): step {self._step}: nothing came from rank {who}, and the group has no plan yet. All ranks "
            "must enter their stores equally often: read that rank's error, and restart all ranks. If it is only slow, "
            "raise Auto(wait_s=).",
            ranks=settled["late"],
            step=self._step,
        )

    def _described(self, rank: int) -> str:
        failed = self._shared.read(self._key("failed", rank))
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
            self._steps.use(settled["decisions"])

    # -- steps of a plan: no rank waits -------------------------------------------------------------------------------

    def _agree(self, plan: Plan) -> None:
        """Do this rank's part at this step of a round."""
        shared, (number, step) = self._shared, divmod(self._step - self._since, ROUND_STEPS)
        before, now = (self._key("round", self._peers[0], self._plans, n) for n in (number - 1, number))
        reports, accepts = ([f"{now}/{what}/{rank}" for rank in self._peers] for what in ("report", "accepts"))
        mine = self._peers.index(shared.rank)
        if step == 0:
            proposed = self._next
            changes = proposed is not None and shared.settle(f"{before}/end", "stay") == "go"
            self._stayed, self._next = proposed, None
            if proposed is not None and changes:
                self._run(proposed)
                return
            shared.put(reports[mine], self._report())
        elif self._planner is None:
            if step == ACCEPT_STEP and (values := shared.read(f"{now}/plan")) is not None:
                self._next = Plan.from_dict(values)
                shared.put(accepts[mine], True)
        elif step == PROPOSE_STEP and shared.has(reports):
            found = [shared.read(name) for name in reports]
            self._next = self._stayed or self._planner.review(self._steps.place, plan, found)
            if self._next is not None:
                shared.put(f"{now}/plan", self._next.to_dict())
            shared.drop([*reports, f"{before}/plan", f"{before}/end", *(f"{before}/accepts/{r}" for r in self._peers)])
        elif step == CONFIRM_STEP and self._next is not None and shared.has(accepts[1:]):
            shared.settle(f"{now}/end", "go")

    def _run(self, plan: Plan) -> None:
        """Run a plan from this step on."""
        self._steps.run(plan)
        self._since = self._step
        self._plans += 1
        self._stayed = None
        self._forget()
        log.info("plan of the group from step %d on: %s", self._step, plan.certificate)
