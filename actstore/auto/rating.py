"""Steps that measure the effect of lossy codecs on gradients, before a plan may choose them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from actstore.accuracy.influence.pairs import Pairs
from actstore.auto.probes import Probes
from actstore.base.ledger import Ledger


class Rating:
    """Steps of one series of probes that measure effects, in pairs.

    Attributes
    ----------
    runs : whether the running step is one of these
    """

    def __init__(self, probes: Probes, pairs: Pairs, ledger: Ledger) -> None:
        self.runs = False
        self._steps = _rate(probes, pairs, ledger)

    def next(self) -> dict[str, str] | None:
        """Return the decisions of the next step; None where enough is known.

        Raises
        ------
        StateError : steps do not show effects; no further step is one of these
        """
        decisions = next(self._steps, None)
        self.runs = decisions is not None
        return decisions


def _rate(probes: Probes, pairs: Pairs, ledger: Ledger) -> Iterator[dict[str, str]]:
    while units := probes.lossy():
        decisions = probes.least() | units
        effect = yield from pairs.look(partial(dict, decisions), probes.least())
        probes.rate(units, effect, {str(account.site): account.site for account in ledger.accounts()})
