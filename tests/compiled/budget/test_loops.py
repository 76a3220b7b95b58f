"""Loops of operators that read one tensor."""

from __future__ import annotations

from actstore.compiled.budget.operator import Operator
from actstore.compiled.budget.step import Loops, RegionStep


def elementwise(*inputs: int, index: int, late: bool = False) -> Operator:
    return Operator(inputs, index, 100, fused=True, inlined=True, late=late)


def gate() -> list[Operator]:
    """An input; a product made again, its activation and the matrix product that reads it; a gradient of both."""
    return [
        Operator((), 0, given=True),
        Operator((0,), 1, 100, 1.0),
        elementwise(1, index=2),
        Operator((2,), 3, 10, 1.0),
        Operator((), 4, 100, given=True, late=True),
        Operator((2, 4), 5, 10, 1.0, late=True),
        Operator((4,), 6, 100, 1.0, late=True),
        elementwise(1, 6, index=7, late=True),
        Operator((7,), 8, 10, 1.0, late=True),
    ]


def test_a_loop_stands_at_its_last_operator_and_readers_follow() -> None:
    loops = Loops(gate(), (1, 2, 5, 6, 7, 8), frozenset())
    assert loops.order == [1, 6, 2, 7, 5, 8]
    assert loops.last == [0, 1, 3, 3, 4, 5]


def test_no_loop_where_one_needs_the_other_by_way_of_a_product() -> None:
    operators = gate()
    operators[6] = Operator((2, 4), 6, 100, 1.0, late=True)
    assert Loops(operators, (1, 2, 5, 6, 7, 8), frozenset()).order == [1, 2, 5, 6, 7, 8]


def test_the_peak_is_that_of_the_loop_and_lower_where_a_plan_keeps_them_apart() -> None:
    step = RegionStep(gate(), (3,), (5, 8))
    found = step.evaluate(frozenset(), loops=True)
    assert found.backward == (1, 2, 5, 6, 7, 8)
    assert found.peak == 510, "product, two gradients and both results at once, beside what forward returned"
    assert step.evaluate(frozenset()).peak == 320
