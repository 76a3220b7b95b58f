"""Random steps of regions: chains of operators with skips, and a backward that reads them."""

from __future__ import annotations

from random import Random

from actstore.compiled.budget.operator import Operator
from actstore.compiled.budget.step import RegionStep


def random_step(seed: int, length: int = 6) -> tuple[RegionStep, frozenset[int]]:
    """A step, and what plain saves: all that backward reads."""
    random = Random(seed)
    operators = [Operator((), 0, given=True)]
    current = 0
    for _ in range(length):
        inputs = {current, random.randrange(len(operators))} if random.random() < 0.3 else {current}
        current = len(operators)
        nbytes, ms = random.randint(1, 8) << 10, random.randint(1, 9) / 4
        operators.append(Operator(tuple(sorted(inputs)), current, nbytes, ms, barred=random.random() < 0.1))
        if random.random() < 0.3:
            operators.append(Operator((current,), current, view=True))
            current = len(operators) - 1
    top = len(operators)
    operators.append(Operator((), top, 1 << 10, given=True, late=True))
    gradient, read = top, set[int]()
    for index in range(top - 1, 0, -1):
        sources = {source for source in (index, index - 1) if source and random.random() < 0.7}
        read |= sources
        at = len(operators)
        operators.append(Operator(tuple(sorted({gradient, *sources})), at, random.randint(1, 4) << 10, 1.0, late=True))
        gradient = at
    return RegionStep(operators, (current,), (gradient,)), frozenset(read)
