"""Saved tensors that leave a plan one after the other, the cheapest for their bytes first, while its peak falls."""

from __future__ import annotations

from collections.abc import Iterator

from actstore.compiled.budget.step import RegionEvaluation, RegionStep


def descend(step: RegionStep, start: RegionEvaluation) -> list[RegionEvaluation]:
    """Return the choices on the way down from `start`, by their peaks.

    A tensor leaves where the peak falls, or stays while fewer bytes are held.
    """
    found, way = start, list[RegionEvaluation]()
    while True:
        lower = next((each for each in _without_one(step, found) if _order(each) < _order(found)), None)
        if lower is None:
            return way
        found = lower
        way.append(found)


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
        return sum(operators[index].ms for index in again) / operators[owner].nbytes

    for owner in sorted((owner for owner in owners if operators[owner].nbytes), key=price):
        yield step.evaluate(found.saved.difference(owners[owner]))
