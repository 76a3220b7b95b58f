"""Protocol of a controller that gives a policy to each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module

from actstore.accuracy.bits.payloads import Choice
from actstore.compiled.budget.plan import GraphPlan
from actstore.plan.plan import Plan
from actstore.policy import Policy
from actstore.store.observers import Gauge
from actstore.store.tierset import TierSet


class StepPolicy(Protocol):
    """A controller that gives a policy to each step of one store. The session calls it under its lock.

    Attributes
    ----------
    name : "auto" or "bits"
    """

    name: str

    @property
    def plan(self) -> Plan | GraphPlan | Choice | None:
        """Current result; None while steps are measured."""

    @property
    def gauge(self) -> Gauge | None:
        """Observer of the store's work; None for none."""

    def next(self, place: TierSet, modules: Iterable[tuple[str, Module]], /) -> Policy:
        """Return the policy of the step that begins now."""

    def begin(self) -> None:
        """Begin the step."""

    def watching(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return the pack hook of an entry, from the store's."""

    def end_forward(self, error: BaseException | None, /) -> None:
        """End the forward, which has failed where `error` is given."""

    def state(self) -> dict[str, Any]:
        """Return what `resume` takes, as JSON values."""

    def resume(self, state: dict[str, Any], place: TierSet, /) -> str:
        """Go on as the controller that gave the state. Return why something is measured or planned again, or ""."""

    def close(self) -> None:
        """Release the measurements."""
