"""The table of what a compiled region saves, for the report. It travels with PyTorch's caches."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from actstore.base.call_site import applied
from actstore.policy import Decision

INPUT, KEPT, EXTRA, PAYLOAD, TOKEN, SAMPLE, AGAIN = "input", "kept", "extra", "payload", "token", "sample", "again"
_ATTRIBUTE = "_actstore_table"
_PLAN = "_actstore_plan"


class SavedRow(NamedTuple):
    """One tensor that autograd saves for a compiled region, or those of a module that backward computes again.

    Attributes
    ----------
    kind : an input of the region, a tensor that is kept, one that is kept and would not be saved without the store, a
        section of a payload, the token of one in a tier, the sign that one was measured, or tensors that are not saved
        and would be without the store. Such rows are the last ones
    name, number : its site; the name is relative to the compiled module
    decision : None for what no rule decides about
    note : why the graph did not follow the decision; empty where it did
    exact : whether the codec of the policy is lossy and `note` forbids it
    saved : bytes that would be saved without the store, of the tensor that a payload stands for, 0 for its further
        sections; -1 for a size of the run
    per_byte : the same for each byte of this section, where `saved` is -1
    tensors : number of them that a payload or tensors that are not saved stand for
    """

    kind: str
    name: str = ""
    number: int = 0
    decision: Decision | None = None
    note: str = ""
    exact: bool = False
    saved: int = 0
    per_byte: int = 0
    tensors: int = 0


Table = tuple[SavedRow, ...]


def attach(metadata: Any, table: Table) -> None:
    """Put a table into the metadata of a region, with which PyTorch's caches keep it."""
    metadata.__dict__[_ATTRIBUTE] = [tuple(row) for row in table]


def attach_plan(metadata: Any, plan: dict[str, Any]) -> None:
    """Put a plan into the metadata of a region, with which PyTorch's caches keep it."""
    metadata.__dict__[_PLAN] = plan


def metadata_of_partition() -> Any:
    """Return the metadata of the region that is partitioned now; None where PyTorch does not show it."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("fw_metadata")
        if type(found).__name__ == "ViewAndMutationMeta":
            return found
        frame = frame.f_back
    return None


def running_table() -> Table | None:
    """Return the table of the region that saves tensors now; None where it has none."""
    rows = _running(_ATTRIBUTE)
    return None if rows is None else tuple(SavedRow(*row) for row in rows)


def running_plan() -> dict[str, Any] | None:
    """Return the plan of the region that saves tensors now; None where it has none."""
    found: dict[str, Any] | None = _running(_PLAN)
    return found


def _running(attribute: str) -> Any:
    """Return what the metadata of the region that saves tensors now has under a name; None for nothing."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if (function := applied(frame)) is not None:
            metadata = getattr(function, "metadata", None)
            return getattr(metadata, "__dict__", {}).get(attribute)
        frame = frame.f_back
    return None
