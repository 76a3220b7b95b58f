"""Makers of controllers, which give a policy to each step."""

from __future__ import annotations

from collections.abc import Callable

from torch.nn import Module

from actstore.accuracy.bits.chooser import BitsController
from actstore.accuracy.influence.influence import Influence
from actstore.accuracy.influence.pairs import Pairs
from actstore.auto.agreed import AgreedController
from actstore.auto.board import Board
from actstore.auto.controller import AutoController
from actstore.base.ledger import Ledger
from actstore.plan.plan import Plan
from actstore.plan.wish import Wish
from actstore.policy import Auto, Bits, Policy
from actstore.session.step_policy import StepPolicy
from actstore.tiers import Window
from actstore.tiers.options import TierOptions

_MIN_WINDOW_NBYTES, _MAX_WINDOW_NBYTES = 2**16, 2**25  # while steps are measured


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
        return BitsController(ledger, chooser, pairs)
    wish = wish_of(chooser, tiers)
    if chooser.group is not None:
        board = Board(chooser.group, chooser.wait_s)
        return AgreedController(model, ledger, wish, board, sets_window=sets_window)
    return AutoController(model, ledger, wish, pairs, switch, sets_window=sets_window)


def wish_of(auto: Auto, tiers: dict[str, TierOptions]) -> Wish:
    """Return the limits of a plan. A disk without a budget is not used."""
    host, disk = tiers.get("host"), tiers.get("disk")
    return Wish(
        auto.budget_nbytes,
        None if host is None else host.budget_nbytes,
        0 if disk is None else disk.budget_nbytes or 0,
        auto.max_noise,
    )


def window_of(given: Window, plan: Plan | None, chooser: Auto | Bits | None) -> Window:
    """Return the window as `given`, or else that of a plan, or an eighth of a budget at most while it is measured."""
    if given.nbytes is not None:
        return given
    nbytes = None if plan is None else plan.window
    if isinstance(chooser, Auto):
        nbytes = max(_MIN_WINDOW_NBYTES, min(chooser.budget_nbytes // 8, _MAX_WINDOW_NBYTES))
    return Window(nbytes, given.when_full)
