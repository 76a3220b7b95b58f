"""Decisions of one call of a recomputed region, in their order: what each operator that decides has chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from actstore.base.ledger import Account, Ledger
    from actstore.base.reaper import Last

_NOTE = "decisions of "


class Decision(NamedTuple):
    """Decision of one call of an operator.

    Attributes
    ----------
    operator : its name
    shape : of its first tensor
    choices : what it has chosen: tensors, or one Python number
    """

    operator: str
    shape: tuple[int, ...]
    choices: tuple[Any, ...]


class Decisions:
    """Decisions of one call of a region, in their order.

    Parameters
    ----------
    region : name of the module and its policy, for messages
    anew : parts of it whose decisions no mode sees; empty for none

    Attributes
    ----------
    kept : in their order
    nbytes : of what is kept
    """

    __slots__ = ("_held", "anew", "kept", "nbytes", "region")

    def __init__(self, region: str, anew: str = "") -> None:
        self.region = region
        self.anew = anew
        self.kept: list[Decision] = []
        self.nbytes = 0
        self._held: Last | None = None

    def ended(self, ledger: Ledger, account: Account) -> None:
        """Book what is kept as held, for as long as this lives."""
        self.nbytes = sum(getattr(choice, "nbytes", 0) for decision in self.kept for choice in decision.choices)
        notes = []
        if self.kept:
            self._held = ledger.hold(account, 0, self.nbytes, self.nbytes)
            names = ", ".join(dict.fromkeys(decision.operator for decision in self.kept))
            notes.append(f"{_NOTE}{names} keep {self.nbytes:,} bytes")
        if self.anew:
            notes.append(f"{_NOTE}{self.anew} are made anew")
        if notes:
            earlier = account.note.partition(_NOTE)[0].rstrip("; ")  # the rest is of an earlier call
            account.note = "; ".join([earlier, *notes] if earlier else notes)


def shape_text(shape: tuple[int, ...]) -> str:
    """Write a shape for people."""
    return "x".join(map(str, shape)) or "a scalar"
