"""The error, in three lines, of a region whose second run differs from its first."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from actstore.base.ledger import Ledger
from actstore.base.spec import Site
from actstore.errors import StateError
from actstore.policy import Recompute
from actstore.recompute.decisions import Decision, Decisions, shape_text
from actstore.recompute.recording import Recording

_POSITION = re.compile(r"tensor at position (\d+):\nsaved metadata: (.*)\nrecomputed metadata: (.*)\n")
_COUNTS = re.compile(r"saved during forward: (\d+)\n.*during recomputation: (\d+)")


def divergence(
    name: str, policy: Recompute, found: str, *, repeats: bool, parts: bool, run_again: Callable[[], object]
) -> StateError:
    """Return the error that replaces PyTorch's.

    Parameters
    ----------
    name, policy : of the module
    found : what PyTorch's error says of the tensors that both runs saved
    repeats : whether the second run has repeated decisions of the first
    parts : whether parts or operators of the region do not run again
    run_again : runs the region once more, to find the decision before the first tensor that differs
    """
    position = _POSITION.search(found)
    counts = _COUNTS.search(found)
    if position is not None:
        at, before, after = position.groups()
        differs = f"tensor {at} that it saves is {_spec(after)}, and was {_spec(before)}"
    elif counts is not None:
        differs = f"it saves {counts[2]} tensors, and saved {counts[1]}"
    else:
        differs = "it saves other tensors"
    decision = None if repeats else _last_decision(run_again, int(position[1]) if position is not None else None)
    lossy = Recompute(policy.inputs).keeps_decisions
    if decision is None:
        had = "It repeated its" if repeats else "It has no"
        why = f"{had} decisions: a Python value, a global or the choice of compiled code has changed since."
        next_step = f"Give that to the module as an argument, or do not recompute it: '{name} : keep'."
        if parts:
            why += " Or it computes a gradient through a part that does not run again, and has no graph then."
            next_step += " For a part: leave the rules inside of the region out."
    elif lossy:
        why = f"{decision} was made anew, from inputs that came back with an error."
        next_step = "Leave decisions=anew out, so that decisions are repeated, or store inputs exactly: recompute(raw)."
    else:
        why = f"{decision} was made anew, by kernels or values that differ from run to run."
        next_step = f"Repeat the decisions of the first run: '{name} : {_keeping(policy)}'."
    return StateError(
        f"The second run of {name} ({policy}) goes another way than its first: {differs}.\n{why}\n{next_step}",
        module=name,
        decision=decision,
    )


def _keeping(policy: Recompute) -> str:
    parts = {field: getattr(policy, field) for field in policy.__dataclass_fields__} | {"decisions": "kept"}
    return str(Recompute(**parts))


def _spec(text: str) -> str:
    """Format the dtype and the shape of a tensor in PyTorch's error."""
    found = re.search(r"Size\(\[(.*?)\]\), 'dtype': torch\.(\w+)", text)
    if found is None:
        return text
    return f"{found[2]} {shape_text(tuple(int(part) for part in found[1].split(',') if part.strip()))}"


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
