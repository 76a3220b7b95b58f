"""Pairs of steps that measure the effect of payload errors on gradients, on request."""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import isfinite
from typing import TypeVar

from actstore.accuracy.influence.effect import GradientEffect
from actstore.accuracy.influence.influence import Influence
from actstore.base.ledger import Ledger
from actstore.errors import StateError

MAX_VAIN_PAIRS = 8  # pairs in a row without a result

T = TypeVar("T")


class Pairs:
    """Pairs of steps: the first is observed, the second gives the noise from batch to batch.

    Parameters
    ----------
    ask : makes the step that begins a sampled one

    Attributes
    ----------
    halfway : whether the next step is the second one of a pair
    """

    def __init__(self, influence: Influence, ledger: Ledger, ask: Callable[[], None]) -> None:
        self._influence = influence
        self._ledger = ledger
        self._ask = ask
        self.halfway = False

    def look(
        self, first: Callable[[], T], second: T, levels: tuple[float, ...] = ()
    ) -> Generator[T, None, GradientEffect]:
        """Yield the decisions of the next two steps that have a backward; the first are made anew until a step has one.

        Parameters
        ----------
        levels : relative errors of payloads to include in `SiteEffect.curve`

        Returns
        -------
        GradientEffect : the effect in the first step, with the noise

        Raises
        ------
        StateError : step after step gives no result
        """
        in_vain = 0
        while in_vain < MAX_VAIN_PAIRS:
            self._ask()
            self._influence.ask(levels)
            self.halfway = False
            yield first()
            looked = self._influence.latest()
            if looked is None:  # failed, an evaluation, or its backward is yet to come
                in_vain += any(account.stored for account in self._ledger.accounts())
                continue
            for _ in range(MAX_VAIN_PAIRS):  # skips evaluations and failures
                self.halfway = True
                yield second
                self.halfway = False
                effect = looked()
                if effect is None or effect.noise is not None:
                    break
            if effect is not None and effect.noise is not None and isfinite(effect.noise):
                return effect
            # overflowed gradients, as during the search for a loss scale, do not count
            in_vain += effect is not None and effect.noise is None
        raise StateError(
            f"{MAX_VAIN_PAIRS} steps with lossy payloads did not show their effect on gradients: no backward came "
            "before the next entry of the store, or the budget has no room for samples of gradients. Run the backward "
            "of each step before the next forward, evaluate under torch.no_grad(), give a larger budget, or name "
            "the codecs.",
            steps=MAX_VAIN_PAIRS,
        )
