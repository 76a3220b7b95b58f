"""Plans for users, made from solutions and compared with policies in one line, and refusals of budgets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf

from actstore.base.units import format_nbytes
from actstore.errors import CapacityError
from actstore.plan.build import kept, policy_of
from actstore.plan.decisions import KEEP, OneLines
from actstore.plan.plan import Plan
from actstore.plan.profile import Profile
from actstore.plan.solver.chain import LayerChain, Limits
from actstore.plan.solver.microbatches import evaluate_step
from actstore.plan.solver.solve import Solution
from actstore.plan.solver.tables import DIRECTIONS
from actstore.plan.solver.timeline import Evaluation, evaluate
from actstore.plan.values import Grants, Prediction, UnitPlan

MIN_GAIN = 0.02  # a new plan replaces the decisions only where it promises this share of the step


def plan_of(
    profile: Profile, chain: LayerChain, solution: Solution, grants: Grants, shift: float, history: tuple[str, ...]
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
        grants.device,
        {
            "device": max(0.0, grants.device - shift),
            "host": grants.host,
            "disk": grants.disk,
            "max_noise": grants.max_noise,
            **({"tiles": 1.0} if grants.tiles else {}),
            **({} if grants.total is None else {"total": grants.total}),
        },
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
    """Return the peak of the bytes queued on the device, the current payload included; None where nothing moves."""
    options = chain.chosen(solution.choice)
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
    found = evaluated(decisions, chain, limits)
    if found is None or not found.feasible or solution.evaluation.total < (1 - MIN_GAIN) * found.total:
        return solution
    return replace(solution, choice=found.choice, evaluation=found, how="as before")


def evaluated(decisions: Mapping[str, str], chain: LayerChain, limits: Limits) -> Evaluation | None:
    """Return the step of these decisions by unit; None where one of them is not measured. Other units keep."""
    choice = []
    for layer in chain.layers:
        wanted = decisions.get(layer.name, KEEP)
        choice.append(next((i for i, each in enumerate(layer.options) if each.decision == wanted), None))
    known = [index for index in choice if index is not None]
    return evaluate_step(chain, known, limits) if len(known) == len(choice) else None


def ran_within(
    chain: LayerChain, limits: Limits, steps: Iterable[tuple[Mapping[str, str], float]], device: float
) -> tuple[Solution, float] | None:
    """Return the fastest choice of the measured steps whose peak was at most `device`, and its peak's excess."""
    free = replace(limits, device=inf)
    known = ((evaluated(decisions, chain, free), peak) for decisions, peak in steps if peak <= device)
    found = [(each, peak - each.device_peak) for each, peak in known if each is not None and each.feasible]
    if not found:
        return None
    best, excess = min(found, key=lambda pair: pair[0].total)
    return Solution(best.choice, best, None, {}, "as measured"), excess


def evaluations(chain: LayerChain, limits: Limits, policies: OneLines) -> Iterator[tuple[str, Evaluation]]:
    """Yield the text and the step of each policy whose decisions are all measured; other units keep."""
    for text, decisions in policies.items():
        if (found := evaluated(decisions, chain, limits)) is not None:
            yield text, found


def fastest(chain: LayerChain, limits: Limits, policies: OneLines) -> tuple[str, Evaluation] | None:
    """Return the fastest policy that keeps the limits; None where none does."""
    found = [each for each in evaluations(chain, limits, policies) if each[1].feasible]
    return min(found, key=lambda each: each[1].total, default=None)


def beside(text: str, policy: Evaluation, solution: Evaluation) -> str:
    """Return the words for the fastest policy in one line beside a solution, as predicted."""
    if policy.choice == solution.choice:
        return f"This is {text!r}."
    return f"The fastest policy in one line that fits is {text!r}: predicted {policy.total:.1f} ms."


def too_small(
    refused: CapacityError,
    chain: LayerChain,
    limits: Limits,
    budget: int,
    beyond: float,
    policies: OneLines,
    smallest: float = inf,
    remedy: str = "",
) -> CapacityError:
    """Return the refusal of a budget: the argument, the bytes that do, and the policy that comes nearest.

    Parameters
    ----------
    refused : the solver's refusal; returned as it is where it is not about the memory of the device
    beyond : bytes that a step has held beyond its prediction
    smallest : the smallest peak of a measured step: enough for exact decisions, which a prediction may not be
    remedy : a sentence for the second line
    """
    if "layer" not in refused.facts or "least" not in refused.facts:
        return refused
    predicted = float(refused.facts["least"]) + beyond
    is_exact = limits.error == inf and smallest < inf
    least = int(smallest if is_exact else min(predicted, smallest)) + 1
    where = refused.facts["layer"] or "the model itself and the loss"
    lines = [
        f"Auto(budget)={format_nbytes(budget)}: the measured decisions need at least {format_nbytes(least)} on the "
        f"device, in {refused.facts['direction']} of {where}.",
        f'Give Auto("{-(-least // 1024)}KiB") or more, or use a smaller batch.{remedy and f" {remedy}"}',
    ]
    free = replace(limits, device=inf)
    known = [each for each in evaluations(chain, free, policies) if each[1].feasible]
    text, nearest = min(known, key=lambda each: each[1].device_peak, default=("", None))
    if nearest is not None:
        lines.append(f"The nearest policy in one line is {text!r}, with {format_nbytes(nearest.device_peak + beyond)}.")
    return CapacityError("\n".join(lines), **{**refused.facts, "least": float(least), "limit": budget, "policy": text})
