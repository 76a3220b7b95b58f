"""Results of ReLU that a later call takes as its input: the payload of that input says what ReLU has let pass.

The bits need not be kept beside it. When the later call runs again, which is before the earlier one does, they are made
from its input, and the payload can go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torch import Tensor

from actstore.autograd.handles import Kept, Stored
from actstore.recompute.decisions import Decisions

if TYPE_CHECKING:
    from actstore.recompute.gates import SharedGate


class _Offer(NamedTuple):
    """A result of ReLU that still lives at the end of its call."""

    result: ref[Tensor]
    version: int
    decisions: ref[Decisions]
    decision: int


class Offers:
    """Results of ReLU that later calls of the same entry of a store may take."""

    def __init__(self) -> None:
        self._offers: dict[int, _Offer] = {}

    def add(self, decisions: Decisions) -> None:
        """Offer what still lives when a call ends: its output."""
        for decision, result, version in decisions.results:
            tensor = result()
            if tensor is not None:
                self._offers[id(tensor)] = _Offer(result, version, ref(decisions), decision)
        decisions.results.clear()

    def take(self, leaf: Tensor, handle: Any, unpack: Callable[[Any], Tensor]) -> SharedGate | None:
        """Share the handle of an input with the call that has put it out, where it says what ReLU let pass there."""
        offer = self._offers.pop(id(leaf), None)
        if offer is None or offer.result() is not leaf or offer.version != leaf._version or not _says_zeros(handle):
            return None
        decisions = offer.decisions()
        return None if decisions is None else decisions.share(offer.decision, handle, unpack)


def _says_zeros(handle: Any) -> bool:
    """Return whether just those elements come back as 0 that were."""
    if isinstance(handle, Stored):
        owner = handle.owner or handle
        return owner.alias is None and (owner.codec.lossless or getattr(owner.codec, "signs", None) == "keep")
    return isinstance(handle, Kept)
