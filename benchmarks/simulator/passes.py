"""Passes of one pipeline device in a step, in order, with the moment from which payloads may come back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from actstore.base.units import format_nbytes
from actstore.errors import CapacityError
from actstore.plan.solver.chain import LayerChain, LayerOption

ROUNDING_TOLERANCE = 1e-9  # of a limit: tolerance for sums of floats


@dataclass(slots=True)
class Pass:
    """Forward or backward of one layer, for one microbatch.

    Attributes
    ----------
    layer : index in the chain
    ms : time of compute alone
    payload : bytes that leave the device after a forward and are back before its backward
    others : bytes that the remaining layers hold on the device meanwhile
    peak : bytes that this layer needs while it runs, with those that it holds and its payload
    after : bytes that all layers hold once it has run
    first, last : whether it is the first or last pass of this stage for this microbatch, in this direction
    """

    layer: int
    microbatch: int
    backward: bool
    option: LayerOption
    ms: float
    payload: float
    others: float
    peak: float
    after: float
    first: bool
    last: bool


def order(stage: int, stages: int, microbatches: int) -> list[tuple[bool, int]]:
    """Return the work of a pipeline stage as (backward, microbatch): 1F1B.

    That is, as many microbatches under way as keep the later stages busy, and from then on one backward for each
    forward.
    """
    ahead = min(stages - stage - 1, microbatches)
    steady = [work for k in range(ahead, microbatches) for work in ((False, k), (True, k - ahead))]
    return [(False, k) for k in range(ahead)] + steady + [(True, k) for k in range(microbatches - ahead, microbatches)]


def passes_of(chain: LayerChain, choice: Sequence[int], stage: int, stages: int, microbatches: int) -> list[Pass]:
    """Return the passes of a stage over its part of the layers."""
    count = len(chain.layers)
    part = range(stage * count // stages, (stage + 1) * count // stages)
    passes: list[Pass] = []
    held = 0.0
    for backward, microbatch in order(stage, stages, microbatches):
        way = part[::-1] if backward else part
        for i in way:
            layer = chain.layers[i]
            option = layer.options[choice[i]]
            payload = option.disk if chain.links.on_host else option.link
            others = held - option.held if backward else held
            peak = max(option.backward_peak if backward else option.forward_peak, option.held + payload)
            ms = layer.backward + option.backward if backward else layer.forward + option.forward
            held = others if backward else held + option.held
            passes.append(
                Pass(i, microbatch, backward, option, ms, payload, others, peak, held, i == way[0], i == way[-1])
            )
    return passes


def check(chain: LayerChain, passes: Sequence[Pass], limit: float) -> None:
    """Refuse passes that cannot run even when nothing is in transit.

    Raises
    ------
    CapacityError : a pass needs more than `limit` bytes
    """
    worst = max(passes, key=lambda step: step.others + step.peak)
    needed = worst.others + worst.peak
    if needed > limit * (1 + ROUNDING_TOLERANCE):
        where = f"{'backward' if worst.backward else 'forward'} of {chain.layers[worst.layer].name}"
        raise CapacityError(
            f"{where} needs {format_nbytes(round(needed))} of device memory, where {format_nbytes(round(limit))} are "
            "allowed: raise the limit, or choose options that hold less",
            needed=needed,
            limit=limit,
        )


class Gates:
    """Gates of fetches: the pass that must have ended before bytes, fetched in order, may come to the device.

    Bytes that came early cannot leave again, so they must fit beside every pass before the one that needs them. With X
    the sum of all payloads up to these bytes, and U(p) that up to pass p (its own included), they fit beside p if
    X <= limit - o(p) - peak(p) + U(p), where o(p) is what the remaining layers hold. They wait for the last p before
    theirs that breaks this.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._fetched = 0.0
        self._rooms: list[float] = []  # rising: rooms of the passes that no later pass is stricter than
        self._passes: list[int] = []

    def payload(self, parts: Sequence[float]) -> list[int]:
        """Return the pass that each part of the next payload waits for; -1 for none."""
        found = []
        for nbytes in parts:
            self._fetched += nbytes
            at = bisect_left(self._rooms, self._fetched) - 1
            found.append(self._passes[at] if at >= 0 else -1)
        return found

    def ran(self, index: int, step: Pass) -> None:
        """Add the next pass, after its payload."""
        room = self._limit - step.others - step.peak + self._fetched
        while self._rooms and self._rooms[-1] >= room:
            self._rooms.pop()
            self._passes.pop()
        self._rooms.append(room)
        self._passes.append(index)
