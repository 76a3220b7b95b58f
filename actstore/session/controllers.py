"""Controllers, which give a policy to each step: their protocol, their makers, and steps that they run again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.nn import Module

from actstore.accuracy.influence.influence import Influence
from actstore.accuracy.influence.pairs import Pairs
from actstore.base.ledger import Ledger
from actstore.plan.plan import Plan
from actstore.plan.values import Grants
from actstore.policy import Auto, Bits, Policy
from actstore.store.observers import Gauge
from actstore.store.tierset import TierSet
from actstore.tiers import Window
from actstore.tiers.options import TierOptions

if TYPE_CHECKING:
    from actstore.accuracy.bits.payloads import Choice
    from actstore.compiled.budget.plan import GraphPlan

_MIN_WINDOW_NBYTES, _MAX_WINDOW_NBYTES = 2**16, 2**25  # while steps are measured


class StepPolicy(Protocol):
    """A controller that gives a policy to each step of one store. The session calls it under its lock.

    Attributes
    ----------
    name : "auto" or "bits"
    """

    name: str

    @property
    def plan(self) -> Plan | None:
        """Plan of "auto"; None while steps are measured."""

    @property
    def graph_plan(self) -> GraphPlan | None:
        """Plan of "auto" for the graphs of a compiled model; None before its first step."""

    @property
    def choice(self) -> Choice | None:
        """Codecs that "bits" has chosen; None while steps are measured."""

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


def controller_of(
    chooser: Auto | Bits | None,
    tiers: dict[str, TierOptions],
    model: Module | None,
    ledger: Ledger,
    influence: Influence | None,
    ask: Callable[[], None],
    switch: Callable[[Policy], bool],
    *,
    sets_window: bool,
) -> StepPolicy | None:
    """Return the controller of a policy that chooses decisions; None for any other policy.

    Parameters
    ----------
    ask : asks the sampler to measure the next step
    switch : runs another policy in a step that has just begun
    sets_window : whether a plan may set the window
    """
    if chooser is None or model is None or influence is None:
        return None
    pairs = Pairs(influence, ledger, ask)
    if isinstance(chooser, Bits):
        from actstore.accuracy.bits.chooser import BitsController

        return BitsController(ledger, chooser, pairs)
    from actstore.auto.controller import AutoController
    from actstore.auto.local import LocalBoard
    from actstore.auto.machine import memory_of
    from actstore.auto.steps import Steps

    grants = grants_of(chooser, tiers, memory_of(model, []).lasting)
    steps = Steps(model, ledger, sets_window=sets_window)
    if chooser.group is None:
        return AutoController(steps, LocalBoard(steps, grants, pairs, switch, chooser))
    from actstore.auto.group import GroupBoard
    from actstore.auto.group_store import GroupStore

    return AutoController(steps, GroupBoard(steps, grants, GroupStore(chooser.group, chooser.wait_s)))


def grants_of(auto: Auto, tiers: dict[str, TierOptions], reserved: int) -> Grants:
    """Return the limits of a plan beside `reserved` bytes of a total. A disk without a budget is not used.

    Raises
    ------
    CapacityError : these bytes leave nothing for activations
    """
    host, disk = tiers.get("host"), tiers.get("disk")
    return Grants(
        auto.beside(reserved).budget_nbytes,
        None if host is None else host.budget_nbytes,
        0 if disk is None else disk.budget_nbytes or 0,
        auto.max_noise,
        auto.tiles,
        auto.total_nbytes,
    )


def window_of(given: Window, plan: Plan | None, chooser: Auto | Bits | None, budget: float) -> Window:
    """Return the window as `given`, or else that of a plan, or an eighth of a budget at most while it is measured."""
    if given.nbytes is not None:
        return given
    nbytes = None if plan is None else plan.window
    if isinstance(chooser, Auto):
        nbytes = int(max(_MIN_WINDOW_NBYTES, min(budget // 8, _MAX_WINDOW_NBYTES)))
    return Window(nbytes, given.when_full)


def call_inside(
    store: AbstractContextManager[Any],
    controller: StepPolicy | None,
    model: Module | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `function` inside of `store`: once more if memory runs out and its effects can be undone."""
    from actstore.auto.attempt import Attempt
    from actstore.auto.controller import AutoController

    if not isinstance(controller, AutoController) or not controller.retries or model is None:
        with store:
            return function(*args, **kwargs)
    attempt = Attempt(model, (args, kwargs))
    try:
        with store:
            return function(*args, **kwargs)
    except BaseException as error:
        if not controller.tightened(error):
            raise
        why = attempt.undo()
        if why:
            error.add_note(f"actstore: the step was not run again, because {why}")
            raise
    with store:
        return function(*args, **kwargs)
