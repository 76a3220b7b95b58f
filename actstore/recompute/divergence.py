"""The error, in three lines, of a region whose second run differs from its first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from actstore.base.ledger import Ledger
from actstore.base.spec import Site
from actstore.errors import StateError
from actstore.policy import Recompute
from actstore.recompute.decision_modes import Recording
from actstore.recompute.decisions import Decision, Decisions, shape_text

SavedForm = tuple[torch.Size, torch.dtype, torch.device]  # of a tensor that a region saves


class RunDifference(NamedTuple):
    """The first difference between the tensors that the two runs of a region save.

    Attributes
    ----------
    position : the number of the first tensor that differs; None where their count does
    was, found : the forms of that tensor, or the counts
    """

    position: int | None
    was: SavedForm | int
    found: SavedForm | int


def divergence(
    name: str,
    policy: Recompute,
    difference: RunDifference,
    *,
    repeats: bool,
    parts: bool,
    run_again: Callable[[], object],
) -> StateError:
    """Return the error.

    Parameters
    ----------
    name, policy : of the module
    difference : between the tensors that both runs saved
    repeats : whether the second run has repeated decisions of the first
    parts : whether parts or operators of the region do not run again
    run_again : runs the region once more, to find the decision before the first tensor that differs
    """
    position, was, found = difference
    if isinstance(was, tuple) and isinstance(found, tuple):
        differs = f"tensor {position} that it saves is {_spec(found)}, and was {_spec(was)}"
    else:
        differs = f"it saves {found} tensors, and saved {was}"
    decision = None if repeats else _last_decision(run_again, position)
    lossy = Recompute(policy.inputs).keeps_decisions
    if decision is None:
        had = "It repeated its" if repeats else "It has no"
        why = f"{had} decisions: a Python value, a global or the choice of compiled code has changed since."
        next_step = f"Give that to the module as an argument, or do not recompute it: '{name} : keep'."
    elif lossy:
        why = f"{decision} was made anew, from inputs that came back with an error."
        next_step = "Leave decisions=anew out, so that decisions are repeated, or store inputs exactly: recompute(raw)."
    else:
        why = f"{decision} was made anew, by kernels or values that differ from run to run."
        next_step = f"Repeat the decisions of the first run: '{name} : {_keeping(policy)}'."
    if parts:
        why += " Or it computes a gradient through a part that does not run again, and has no graph then."
        next_step += " For a part: leave the rules inside of the region out."
    return StateError(
        f"The second run of {name} ({policy}) goes another way than its first: {differs}.\n{why}\n{next_step}",
        module=name,
        decision=decision,
    )


def _keeping(policy: Recompute) -> str:
    parts = {field: getattr(policy, field) for field in policy.__dataclass_fields__} | {"decisions": "kept"}
    return str(Recompute(**parts))


def _spec(form: SavedForm) -> str:
    shape, dtype, _ = form
    return f"{str(dtype).removeprefix('torch.')} {shape_text(tuple(shape))}"


def _last_decision(run_again: Callable[[], object], position: int | None) -> str | None:
    """Run a region again, and return the last decision before the saved tensor at `position`; None for no decision."""
    decisions = Decisions("", ledger := Ledger(), ledger.account(Site("", 0)))
    last: list[Decision] = []
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        if saved == position:
            last.extend(decisions.kept)
        saved += 1
        return tensor.detach()

    try:
        with saved_tensors_hooks(pack, _as_it_is), Recording(decisions):
            run_again()
    except Exception:  # the divergence error says more
        return None
    before = last or decisions.kept
    if not before:
        return None
    nth = len(before)
    return f"Decision {nth} of the region, {before[-1].operator} of {shape_text(before[-1].shape)},"


def _as_it_is(packed: Any) -> Any:
    return packed
