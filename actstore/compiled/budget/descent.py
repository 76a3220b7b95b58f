"""Saved tensors that leave a plan one after the other, the cheapest for their bytes first, while its peak falls."""

from __future__ import annotations

from collections.abc import Iterator

from actstore.compiled.budget.step import RegionEvaluation, RegionStep


def descend(step: RegionStep, start: RegionEvaluation) -> Iterator[RegionEvaluation]:
    """Yield `start`, and the choices on the way down from it.

    A tensor leaves where the peak falls, or stays while fewer bytes are held.
    """
    found: RegionEvaluation | None = start
    while found is not None:
        yield found
        order = _order(found)
        found = next((each for each in _without_one(step, found) if _order(each) < order), None)


def _order(found: RegionEvaluation) -> tuple[int, int]:
    return found.peak, sum(found.held.values())


def _without_one(step: RegionStep, found: RegionEvaluation) -> Iterator[RegionEvaluation]:
    """Yield the evaluations without the memory of one owner each, in the order of time for its bytes."""
    operators = step.operators
    saved = [index for index in found.saved if not (operators[index].given or operators[index].barred)]
    owners: dict[int, list[int]] = {}
    for index in sorted(saved):
        owners.setdefault(operators[index].owner, []).append(index)

    def price(owner: int) -> float:
        again = {each for index in owners[owner] for each in step.sources([index], found.saved - {index})}
        return sum(operators[index].again_ms for index in again) / operators[owner].nbytes

    for owner in sorted((owner for owner in owners if operators[owner].nbytes), key=price):
        yield step.evaluate(found.saved.difference(owners[owner]))
