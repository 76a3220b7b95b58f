"""Policies in one line beside a plan: the fastest of them within its limits, and the one with the least memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf

from actstore.base.units import format_nbytes
from actstore.errors import CapacityError
from actstore.plan.profile import KEEP
from actstore.plan.solver.chain import LayerChain, Limits
from actstore.plan.solver.microbatches import evaluate_step
from actstore.plan.solver.timeline import Evaluation

OneLines = Mapping[str, Mapping[str, str]]


def evaluations(chain: LayerChain, limits: Limits, policies: OneLines) -> Iterator[tuple[str, Evaluation]]:
    """Yield the text and the step of each policy whose decisions are all measured; other units keep."""
    for text, decisions in policies.items():
        choice = []
        for layer in chain.layers:
            wanted = decisions.get(layer.name, KEEP)
            choice.append(next((i for i, each in enumerate(layer.options) if each.decision == wanted), None))
        if None not in choice:
            yield text, evaluate_step(chain, [index for index in choice if index is not None], limits)


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
    refused: CapacityError, chain: LayerChain, limits: Limits, budget: int, beyond: float, policies: OneLines
) -> CapacityError:
    """Return the refusal of a budget: the argument, the bytes that do, and the policy that comes nearest.

    Parameters
    ----------
    refused : the solver's refusal; returned as it is where it is not about the memory of the device
    beyond : bytes that a step has held beyond its prediction
    """
    if "layer" not in refused.facts or "least" not in refused.facts:
        return refused
    least = int(float(refused.facts["least"]) + beyond) + 1
    where = refused.facts["layer"] or "the model itself and the loss"
    lines = [
        f"Auto(budget)={format_nbytes(budget)}: the measured decisions need at least {format_nbytes(least)} on the "
        f"device, in {refused.facts['direction']} of {where}.",
        f'Give Auto("{-(-least // 1024)}KiB") or more, or use a smaller batch.',
    ]
    free = replace(limits, device=inf)
    known = [each for each in evaluations(chain, free, policies) if each[1].feasible]
    text, nearest = min(known, key=lambda each: each[1].device_peak, default=("", None))
    if nearest is not None:
        lines.append(f"The nearest policy in one line is {text!r}, with {format_nbytes(nearest.device_peak + beyond)}.")
    return CapacityError("\n".join(lines), **{**refused.facts, "least": float(least), "limit": budget, "policy": text})
