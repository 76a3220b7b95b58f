"""Plans of a group that its ranks have loaded: the ranks run them only where all have the same one."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from torch.nn import Module

from actstore.auto.planning_state import changed, unfit
from actstore.errors import StateError
from actstore.plan.plan import Plan
from actstore.plan.wish import Wish

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
    def read(cls, state: dict[str, Any], model: Module, device: torch.device, wish: Wish, ranks: int) -> SavedPlan:
        """Return the plan of a state, for a rank with these limits in a group of so many ranks."""
        plan = None if state["plan"] is None else Plan.from_dict(state["plan"])
        why = unfit(plan, model, device)
        if not why and state["ranks"] != ranks:
            why = f"the group has {ranks} ranks, before {state['ranks']}"
        if not why and (before := Wish(**state["wish"])) != wish:
            why = changed(before, wish)
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
