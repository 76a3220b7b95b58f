"""Results of ReLU that a later call takes as input: the payload of that input holds the gate of the ReLU.

The gate's bits are then redundant. When the later call reruns, which is before the earlier one, the bits are packed
from its input, and the payload can be freed.
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
    """A result of ReLU that is alive at the end of its call."""

    result: ref[Tensor]
    version: int
    decisions: ref[Decisions]
    decision: int


class Offers:
    """Results of ReLU that later calls of the same entry of a store may take."""

    def __init__(self) -> None:
        self._offers: dict[int, _Offer] = {}

    def add(self, decisions: Decisions) -> None:
        """Offer the results that are alive when a call ends, which are its output."""
        for decision, result, version in decisions.results:
            tensor = result()
            if tensor is not None:
                self._offers[id(tensor)] = _Offer(result, version, ref(decisions), decision)
        decisions.results.clear()

    def take(self, leaf: Tensor, handle: Any, unpack: Callable[[Any], Tensor]) -> SharedGate | None:
        """Return a gate that reads the handle of an input, for the call that returned it; None if none is there."""
        offer = self._offers.pop(id(leaf), None)
        if offer is None or offer.result() is not leaf or offer.version != leaf._version or not _says_zeros(handle):
            return None
        decisions = offer.decisions()
        return None if decisions is None else decisions.share(offer.decision, handle, unpack)


def _says_zeros(handle: Any) -> bool:
    """Return whether exactly the elements that were 0 come back as 0."""
    if isinstance(handle, Stored):
        owner = handle.owner or handle
        return owner.alias is None and (owner.codec.lossless or getattr(owner.codec, "signs", None) == "keep")
    return isinstance(handle, Kept)
