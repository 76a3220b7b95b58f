"""Notes of sites: the reason why the store did not follow a decision."""

from __future__ import annotations

from typing import NamedTuple

SMALL = "small"  # below the limit of the store's `min_bytes`


class Note(NamedTuple):
    """Reason why the store did not follow the decision on a tensor. False where it did.

    Attributes
    ----------
    reason : text for the report; empty where the store followed the decision
    kept : whether the tensor is kept for that reason
    full : tiers without room, where that is the reason
    decisions : text about the kept decisions of a recomputed module, after the reason
    """

    reason: str = ""
    kept: bool = False
    full: tuple[str, ...] = ()
    decisions: str = ""

    @classmethod
    def no_room(cls, tiers: tuple[str, ...]) -> Note:
        """Return the note of a tensor that is kept because none of `tiers` has room."""
        return cls(f"no room in {' > '.join(tiers)}", True, tiers)

    def __bool__(self) -> bool:
        return bool(self.reason or self.decisions)

    def __str__(self) -> str:
        reason = f"kept: {self.reason}" if self.kept and self.reason else self.reason
        return "; ".join(filter(None, (reason, self.decisions)))


FOLLOWED = Note()
DERIVED = Note("derived: a product of exact tensors")
