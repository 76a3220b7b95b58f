"""Plans for users, built from solutions of the solver."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from actstore.plan.build import kept, policy_of
from actstore.plan.plan import Plan
from actstore.plan.profile import KEEP, Profile
from actstore.plan.solver.chain import LayerChain, Limits
from actstore.plan.solver.microbatches import evaluate_step
from actstore.plan.solver.solve import Solution
from actstore.plan.solver.tables import DIRECTIONS
from actstore.plan.solver.timeline import evaluate
from actstore.plan.values import Prediction, UnitPlan
from actstore.plan.wish import Wish

MIN_GAIN = 0.02  # a new plan replaces the decisions only where it promises this share of the step


def plan_of(
    profile: Profile, chain: LayerChain, solution: Solution, wish: Wish, shift: float, history: tuple[str, ...]
) -> Plan:
    """Build the plan of a solution."""
    rows = []
    for i, (unit, layer) in enumerate(zip(profile.units, chain.layers, strict=True)):
        option = layer.options[solution.choice[i]]
        saved = unit.share * kept(profile.figures[unit.kind]).total("saved")
        stall = sum(stalls[i] for stalls in solution.evaluation.stalls)
        added = option.forward + option.backward
        rows.append(UnitPlan(unit.name, option.decision, saved, option.held, option.host + option.disk, added, stall))
    return Plan(
        policy_of(chain, solution.choice),
        wish.device,
        {"device": max(0.0, wish.device - shift), "host": wish.host, "disk": wish.disk, "max_noise": wish.max_noise},
        chain.plain,
        Prediction(solution.evaluation.total, solution.evaluation.device_peak + shift, solution.evaluation.error),
        solution.bound,
        solution.certificate,
        solution.prices,
        _window(chain, solution),
        _limit(chain, solution),
        tuple(rows),
        profile,
        None,
        history,
    )


def _window(chain: LayerChain, solution: Solution) -> int | None:
    """Return the most bytes queued on the device, the current layer's payload included; None where nothing moves."""
    options = [layer.options[index] for layer, index in zip(chain.layers, solution.choice, strict=True)]
    largest = max((option.host + option.disk for option in options), default=0)
    if not largest:
        return None
    evaluation = solution.evaluation
    if any(layer.waiting > 1 for layer in chain.layers):  # its bytes are those of other micro-batches, too
        evaluation = evaluate(chain, solution.choice, Limits(inf))
    held = queued = 0.0
    for i, option in enumerate(options):
        for events, peak in zip(evaluation.device, (option.forward_peak, option.backward_peak), strict=True):
            queued = max(queued, events[i] - held - peak)
        held += option.held
    return int(queued + largest)


def _limit(chain: LayerChain, solution: Solution) -> str:
    evaluation = solution.evaluation
    if evaluation.overhead <= 0:
        return "compute alone; everything fits"
    stalls = [sum(part) for part in evaluation.stalls]
    waits = sum(stalls) + sum(evaluation.drain)
    direction, layer = evaluation.peak_event()
    where = f"{DIRECTIONS[direction]} of {chain.layers[layer].name or 'the loss'}"
    text = f"memory of the device, most of it in {where}"
    return f"{text}; compute waits {waits:.1f} ms for copies" if waits > 0 else text


def or_as_before(decisions: dict[str, str], chain: LayerChain, limits: Limits, solution: Solution) -> Solution:
    """Return the running choice where it is still possible and `solution` hardly gains, otherwise `solution`."""
    indices = [
        next((i for i, option in enumerate(layer.options) if option.decision == decisions.get(layer.name, KEEP)), None)
        for layer in chain.layers
    ]
    if any(index is None for index in indices):
        return solution
    choice = tuple(index for index in indices if index is not None)
    found = evaluate_step(chain, choice, limits)
    if not found.feasible or solution.evaluation.total < (1 - MIN_GAIN) * found.total:
        return solution
    return replace(solution, choice=choice, evaluation=found, how="as before")
