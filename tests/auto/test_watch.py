"""The rules by which a step makes a new plan, which one process and a group of ranks share."""

from actstore.auto.watch import deviates, is_larger, needs_plan, underestimate


def test_steps_of_nearly_the_same_size_count_as_equally_large():
    assert not is_larger(105, 100)
    assert is_larger(106, 100)


def test_a_step_over_the_budget_needs_plan_unless_the_plan_exceeds_it_anyway():
    assert needs_plan(100, 100, excess=False)
    assert not needs_plan(105, 100, excess=True)
    assert needs_plan(106, 100, excess=True)


def test_a_prediction_was_too_low_only_for_a_step_of_the_size_that_it_was_made_for():
    assert underestimate(130.0, 100.0, 105, 100) == 30.0
    assert underestimate(130.0, 100.0, 106, 100) == 0.0
    assert underestimate(90.0, 100.0, 100, 100) == 0.0


def test_a_time_deviates_in_both_directions():
    assert [step for step in (89.0, 91.0, 109.0, 111.0) if deviates(step, 100.0)] == [89.0, 111.0]
