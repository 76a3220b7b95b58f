"""Plans of steps in which several micro-batches wait for backward at once, as in the stages of a pipeline.

The timeline knows one forward and one backward: what later layers hold is gone when an earlier one runs its backward.
In a pipeline only one micro-batch has left them then, and the remaining ones still hold their share there.

Where a rank has several stages, each has its most micro-batches at another turn. Then the bytes of each turn must fit,
and beside them the largest need of a layer while it runs. The solver knows one such sum. It solves the step of each
turn alone, and that of their mean, and each solution that exceeds the limit at another turn lowers it for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from operator import add

from actstore.errors import CapacityError
from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits, most_at_once, share_at, spilled
from actstore.plan.solver.least import least
from actstore.plan.solver.solve import Solution, refusal, solve
from actstore.plan.solver.tables import DIRECTIONS, slack
from actstore.plan.solver.timeline import Breach, Evaluation, evaluate


def beside_others(chain: LayerChain, found: Evaluation, limits: Limits) -> Evaluation:
    """Return an evaluation with the bytes that the remaining micro-batches hold in later layers, and what these break.

    It also has the bytes that a layer holds because an earlier one, which saves them too, does not. Where one
    micro-batch waits at a time, and no bytes are shared, that is the evaluation itself.
    """
    if _number_of_turns(chain) > 1:
        device = _at_turns(chain, found.choice)
    elif any(later := list(map(add, _later(chain, found.choice), accumulate(spilled(chain, found.choice))))):
        forward, backward = (tuple(map(sum, zip(events, later, strict=True))) for events in found.device)
        device = forward, backward
    else:
        return found
    found = replace(found, device=device, broken=tuple(b for b in found.broken if b.limit != "device"))
    if found.device_peak <= limits.device + slack(limits.device):
        return found
    direction, layer = found.peak_event()
    breach = Breach("device", found.device_peak, limits.device, DIRECTIONS[direction], chain.layers[layer].name)
    return replace(found, broken=(breach, *found.broken))


def evaluate_step(chain: LayerChain, choice: Sequence[int], limits: Limits) -> Evaluation:
    """Evaluate the step under `choice` beside the remaining micro-batches. The slowest turn decides its time.

    Raises
    ------
    ConfigError : as `evaluate`
    """
    found = [beside_others(chain, evaluate(alike, choice, limits), limits) for alike in _alike(chain)]
    return max(found, key=lambda evaluation: evaluation.total)


def _number_of_turns(chain: LayerChain) -> int:
    return max([1, *(len(layer.turns) for layer in chain.layers)])


def _at_turns(chain: LayerChain, choice: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return for each direction and layer the bytes of the fullest turn, with those that the layer needs to run."""
    chosen = [layer.options[index] for layer, index in zip(chain.layers, choice, strict=True)]
    most = most_at_once((option.held, layer.turns) for layer, option in zip(chain.layers, chosen, strict=True))
    forward = tuple(most + option.forward_peak - option.held for option in chosen)
    return forward, tuple(most + option.backward_peak - option.held for option in chosen)


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
    bounds: list[float | None] = []
    found: list[Solution] = []
    for alike in _alike(chain):
        try:
            solution = _lowered(chain, alike, limits, bounds)
            found += [] if solution is None else [solution]
        except CapacityError as refused:
            if "least" not in refused.facts or not (chain.shared or any(layer.waiting > 1 for layer in chain.layers)):
                raise
    if not found:
        return _least_step(chain, limits)
    best = min(found, key=lambda solution: solution.evaluation.total)
    return replace(best, bound=max((bound for bound in bounds if bound is not None), default=None))


def _alike(chain: LayerChain) -> list[LayerChain]:
    """Return chains of one turn that need no more than `chain`: that of each turn, and of their mean."""
    number = _number_of_turns(chain)
    if number == 1:
        return [chain]
    of_layers = [[share_at(layer.turns, i) for i in range(number)] for layer in chain.layers]
    turns = [*zip(*of_layers, strict=True), [sum(shares) / number for shares in of_layers]]
    return [replace(chain, layers=tuple(map(_with_share, chain.layers, shares))) for shares in turns]


def _with_share(layer: Layer, share: float) -> Layer:
    def scaled(option: LayerOption) -> LayerOption:
        less = (1 - share) * option.held
        return replace(
            option,
            held=option.held - less,
            forward_peak=option.forward_peak - less,
            backward_peak=option.backward_peak - less,
        )

    return replace(layer, options=tuple(map(scaled, layer.options)))


def _lowered(chain: LayerChain, alike: LayerChain, limits: Limits, bounds: list[float | None]) -> Solution | None:
    """Solve a chain that needs no more than `chain` within lower and lower limits, until `chain` keeps its own.

    The bound of the first solution, which holds for `chain`, is added to `bounds`. None where a layer that `alike` does
    not count exceeds the limit.

    Raises
    ------
    CapacityError, ConfigError : as `solve`
    """
    device, first = limits.device, True
    while device >= 0:
        solution = solve(alike, replace(limits, device=device))
        if first:
            bounds.append(solution.bound)
        found = beside_others(chain, solution.evaluation, limits)
        over = found.device_peak - limits.device
        if over <= slack(limits.device):
            return replace(solution, evaluation=found)
        device, first = device - max(over, slack(limits.device)), False
    return None


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
