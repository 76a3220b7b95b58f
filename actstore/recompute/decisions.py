"""Decisions of one call of a recomputed region, in order: the choices of each operator that decides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torch import Tensor

from actstore.recompute.gates import SharedGate

if TYPE_CHECKING:
    from actstore.base.ledger import Account, Ledger
    from actstore.base.reaper import Finalizer


class Decision(NamedTuple):
    """Decision of one call of an operator.

    Attributes
    ----------
    operator : name of the operator
    shape : of its first tensor
    choices : what it has chosen: tensors, or one Python number
    """

    operator: str
    shape: tuple[int, ...]
    choices: tuple[Any, ...]


class Decisions:
    """Decisions of one call of a region, in order.

    Parameters
    ----------
    region : name of the module and its policy, for messages
    ledger, account : the books of the kept bytes
    compiled : whether the region has compiled parts

    Attributes
    ----------
    kept : the decisions, in order
    anew : parts of the region whose decisions no mode sees; empty for none
    results : results of ReLU, by the number of the decision, with their versions after ReLU
    nbytes : size of the kept decisions
    """

    __slots__ = (
        "__weakref__",
        "_account",
        "_compiled",
        "_held",
        "_ledger",
        "_shared",
        "anew",
        "kept",
        "nbytes",
        "region",
        "results",
    )

    def __init__(self, region: str, ledger: Ledger, account: Account, compiled: bool = False) -> None:
        self.region = region
        self.anew = ""
        self._compiled = compiled
        self.kept: list[Decision] = []
        self.results: list[tuple[int, ref[Tensor], int]] = []
        self.nbytes = 0
        self._ledger = ledger
        self._account = account
        self._held: Finalizer | None = None
        self._shared = False

    def ended(self) -> None:
        """Record the kept decisions as held, for as long as this object lives."""
        self.nbytes = sum(getattr(choice, "nbytes", 0) for decision in self.kept for choice in decision.choices)
        if self.kept:
            self._held = self._ledger.hold(self._account, 0, self.nbytes, self.nbytes)
        self._tell()

    def share(self, number: int, handle: Any, unpack: Callable[[Any], Tensor]) -> SharedGate:
        """Read decision `number`, one of ReLU, from the `handle` of its result instead, and free its bits."""
        gate = SharedGate(handle, unpack, partial(self._ledger.hold, self._account, 0, 0))
        decision = self.kept[number]
        freed = decision.choices[0].nbytes
        self.kept[number] = decision._replace(choices=(gate,))
        self.nbytes -= freed
        self._held = None
        self._held = self._ledger.hold(self._account, 0, -freed, self.nbytes)
        self._shared = True
        self._tell()
        return gate

    def _tell(self) -> None:
        """Note in the report which decisions are kept."""
        notes = []
        if self.kept:
            names = ", ".join(dict.fromkeys(decision.operator for decision in self.kept))
            beside = ", and one is read from the next input" if self._shared else ""
            notes.append(f"decisions of {names} keep {self.nbytes:,} bytes{beside}")
        if self._compiled:
            notes.append("decisions of compiled parts are repeated: they run uncompiled")
        if self.anew:
            notes.append(f"decisions of {self.anew} are made anew")
        if notes:
            self._account.note = self._account.note._replace(decisions="; ".join(notes))


def shape_text(shape: tuple[int, ...]) -> str:
    """Format a shape."""
    return "x".join(map(str, shape)) or "a scalar"
