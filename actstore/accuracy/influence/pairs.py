"""Looks at what the errors of payloads do to gradients, in steps that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import isfinite
from typing import TypeVar

from actstore.accuracy.influence.effect import GradientEffect
from actstore.accuracy.influence.influence import Influence
from actstore.base.ledger import Ledger
from actstore.errors import StateError

PATIENCE = 8  # pairs in a row that show nothing

T = TypeVar("T")


class Pairs:
    """Steps in pairs: the first is looked at, the second gives the noise from batch to batch.

    Parameters
    ----------
    ask : has the step that begins sampled
    """

    def __init__(self, influence: Influence, ledger: Ledger, ask: Callable[[], None]) -> None:
        self._influence = influence
        self._ledger = ledger
        self._ask = ask

    def look(
        self, first: Callable[[], T], second: T, levels: tuple[float, ...] = ()
    ) -> Generator[T, None, GradientEffect]:
        """What decides in the next two steps that have a backward; the first is made anew until it has one.

        Parameters
        ----------
        levels : relative errors of payloads that are to be in `SiteEffect.curve`

        Returns
        -------
        GradientEffect : of the first, with the noise

        Raises
        ------
        StateError : steps show nothing again and again
        """
        in_vain = 0
        while in_vain < PATIENCE:
            self._ask()
            self._influence.ask(levels)
            yield first()
            looked = self._influence.latest()
            if looked is None:  # it failed, or it was an evaluation, or its backward is yet to come
                in_vain += any(account.stored for account in self._ledger.accounts())
                continue
            for _ in range(PATIENCE):  # evaluations and failures between the two have no backward
                yield second
                effect = looked()
                if effect is None or effect.noise is not None:
                    break
            if effect is not None and effect.noise is not None and isfinite(effect.noise):
                return effect
            # gradients that overflowed, as they do while a loss scale is found, count for nothing
            in_vain += effect is not None and effect.noise is None
        raise StateError(
            f"{PATIENCE} steps with lossy payloads did not show what these do to gradients: no backward came before "
            "the next entry of the store, or the budget has no room for samples of gradients. Run the backward of each "
            "step before the next forward, evaluate under torch.no_grad(), give a larger budget; or name the codecs",
            steps=PATIENCE,
        )
