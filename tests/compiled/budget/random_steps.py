"""Random steps of regions: chains of operators with skips, and a backward that reads them."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

from actstore.compiled.budget.lane import TierLane
from actstore.compiled.budget.operator import Operator
from actstore.compiled.budget.step import RegionStep

SMALL, LARGE = 1 << 10, 1 << 20
LANE = TierLane("disk", inf, 4e6, 2e6, 8e6, (LARGE, 4 * LARGE), on_host=True, recycles=True)


def random_step(
    seed: int, length: int = 6, lane: TierLane | None = None, *, encodes: bool = False
) -> tuple[RegionStep, frozenset[int]]:
    """A step, and what plain saves: all that backward reads. With a lane its tensors are large, and most can move.

    encodes : whether payloads may stand for most tensors
    """
    unit = SMALL if lane is None else LARGE
    random = Random(seed)
    operators = [Operator((), 0, given=True)]
    current = 0
    for _ in range(length):
        inputs = {current, random.randrange(len(operators))} if random.random() < 0.3 else {current}
        current = len(operators)
        nbytes, ms = random.randint(1, 8) * unit, random.randint(1, 9) / 4
        operators.append(Operator(tuple(sorted(inputs)), current, nbytes, ms, barred=random.random() < 0.1))
        if random.random() < 0.3:
            operators.append(Operator((current,), current, view=True))
            current = len(operators) - 1
    top = len(operators)
    operators.append(Operator((), top, unit, given=True, late=True))
    gradient, read = top, set[int]()
    for index in range(top - 1, 0, -1):
        sources = {source for source in (index, index - 1) if source and random.random() < 0.7}
        read |= sources
        at = len(operators)
        operators.append(Operator(tuple(sorted({gradient, *sources})), at, random.randint(1, 4) * unit, 1.0, late=True))
        gradient = at
    if lane is not None:
        movable = {index for index in range(1, top) if random.random() < 0.8}
        nbytes = [operators[each.owner].nbytes if each.owner in movable else 0 for each in operators]
        operators = [replace(each, movable=size) for each, size in zip(operators, nbytes, strict=True)]
    for index, each in enumerate(operators[1:top] if encodes else (), 1):
        if each.owner == index and random.random() < 0.8:
            workspace = random.randint(0, 2) * each.nbytes
            operators[index] = replace(each, encoded=each.nbytes // 4, code_ms=0.25, code_workspace=workspace)
    return RegionStep(operators, (current,), (gradient,), lane=lane, encodes=encodes), frozenset(read)
