"""Plans of steps in which several micro-batches wait for backward at once, as in the stages of a pipeline.

The timeline knows one forward and one backward: what later layers hold is gone when an earlier one runs its backward.
In a pipeline only one micro-batch has left them then, and the remaining ones still hold their share there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from actstore.errors import CapacityError
from actstore.plan.solver.chain import LayerChain, Limits
from actstore.plan.solver.least import least
from actstore.plan.solver.solve import Solution, refusal, solve
from actstore.plan.solver.tables import DIRECTIONS, slack
from actstore.plan.solver.timeline import Breach, Evaluation


def beside_others(chain: LayerChain, found: Evaluation, limits: Limits) -> Evaluation:
    """Return an evaluation with the bytes that the remaining micro-batches hold in later layers, and what these break.

    Where one micro-batch waits at a time, that is the evaluation itself.
    """
    later = _later(chain, found.choice)
    if not any(later):
        return found
    forward, backward = (tuple(map(sum, zip(events, later, strict=True))) for events in found.device)
    found = replace(found, device=(forward, backward), broken=tuple(b for b in found.broken if b.limit != "device"))
    if found.device_peak <= limits.device + slack(limits.device):
        return found
    direction, layer = found.peak_event()
    breach = Breach("device", found.device_peak, limits.device, DIRECTIONS[direction], chain.layers[layer].name)
    return replace(found, broken=(breach, *found.broken))


def _later(chain: LayerChain, choice: Sequence[int]) -> list[float]:
    """Return for each layer the bytes that all micro-batches but one hold in the layers after it."""
    later, nbytes = [], 0.0
    for layer, index in reversed(list(zip(chain.layers, choice, strict=True))):
        later.append(nbytes)
        nbytes += (1 - 1 / layer.waiting) * layer.options[index].held
    return later[::-1]


def solve_step(chain: LayerChain, limits: Limits) -> Solution:
    """Choose options as `solve`, within limits that hold beside the remaining micro-batches, too.

    Each solution that exceeds the device's limit lowers it for the next one. Where nothing is left, the choice with the
    least memory remains.

    Raises
    ------
    CapacityError, ConfigError : as `solve`
    """
    device = limits.device
    while True:
        try:
            solution = solve(chain, replace(limits, device=device))
        except CapacityError as refused:
            if "least" not in refused.facts or all(layer.waiting == 1 for layer in chain.layers):
                raise
            return _least_step(chain, limits)
        found = beside_others(chain, solution.evaluation, limits)
        over = found.device_peak - limits.device
        if over <= slack(limits.device):
            return replace(solution, evaluation=found)
        device -= max(over, slack(limits.device))


def _least_step(chain: LayerChain, limits: Limits) -> Solution:
    """Return the choice with the least memory.

    Raises
    ------
    CapacityError : it exceeds the limits, too
    """
    needs = least(chain, limits)
    found = beside_others(chain, needs.evaluation, replace(limits, device=inf))
    if found.device_peak > limits.device + slack(limits.device):
        direction, layer = found.peak_event()
        name = chain.layers[layer].name
        raise refusal(replace(needs, device=found.device_peak, direction=DIRECTIONS[direction], layer=name), limits)
    return Solution(found.choice, found, None, {}, "least memory")
