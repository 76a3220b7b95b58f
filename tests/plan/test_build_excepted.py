"""Options that recompute a unit except for a part of it."""

import random
from dataclasses import replace
from math import inf

import pytest

from actstore import Auto, Plan
from actstore.errors import CapacityError
from actstore.plan.build import chain_of, limits_of
from actstore.plan.decisions import KEEP, except_from_recompute, excepted_part
from actstore.plan.explain import explain
from actstore.plan.profile import Profile, UnitBytes, UnitFigures
from actstore.plan.solver.solve import solve
from actstore.policy import Rules
from actstore.session.planning import replan
from tests.plan.chains import enumerated
from tests.plan.profiles import MIB, profile

ATTENTION = except_from_recompute("attn", KEEP)
LOSSY = except_from_recompute("attn", "int8")
MOVED = except_from_recompute("@sdpa", "raw @ host")
PRODUCTS = except_from_recompute("@matmul", KEEP)


def figures(decision, held, work, *, host=0, transient=50 * MIB, error=0.0):
    parts = {"": UnitBytes(60 * MIB, 5 * MIB), "attn": UnitBytes(40 * MIB, held, host)}
    return UnitFigures(decision, 10.0, 20.0 + work, parts, transient, error, work_backward=work)


def with_exceptions(layers=12):
    made = profile(layers)
    of_block = {
        ATTENTION: figures(ATTENTION, 40 * MIB, 4.0),
        LOSSY: figures(LOSSY, 15 * MIB, 4.5, error=1e-3),
        MOVED: figures(MOVED, 0, 7.0, host=8 * MIB),
        PRODUCTS: figures(PRODUCTS, 35 * MIB, 1.5),
    }
    return replace(made, figures=made.figures | {"Block": made.figures["Block"] | of_block})


def options_of(chain, unit="blocks.0"):
    (layer,) = (layer for layer in chain.layers if layer.name == unit)
    return {option.decision: option for option in layer.options}


def test_an_option_has_the_measured_figures():
    options = options_of(chain_of(with_exceptions()))
    assert LOSSY not in options
    kept, moved = options[ATTENTION], options[MOVED]
    assert (kept.held, kept.backward_peak, kept.forward + kept.backward) == (45 * MIB, 95 * MIB, 4.0)
    assert (kept.link, kept.host, kept.error) == (0, 0, 0.0)
    assert (moved.held, moved.link, moved.host, moved.backward_peak) == (5 * MIB, 8 * MIB, 8 * MIB, 63 * MIB)
    assert not any(excepted_part(decision) for decision in options_of(chain_of(profile())))


def test_a_lossy_exception_adds_the_noise_of_its_part():
    made = with_exceptions()
    assert options_of(chain_of(made, 0.1))[LOSSY].error == 1e-3 * made.units[1].noise["attn"]
    unknown = replace(made, units=tuple(replace(unit, noise={"": 0.5, "mlp": 4.0}) for unit in made.units))
    assert LOSSY not in options_of(chain_of(unknown, 0.1))


@pytest.mark.parametrize("budget", [250, 400])
def test_exceptions_make_plans_faster_and_are_shown(budget, tmp_path, monkeypatch):
    monkeypatch.setattr("actstore.plan.explain.SHOWN_BUDGETS", 2)  # each takes the solver's time
    before, plan = (replan(made, Auto(budget * MIB)) for made in (profile(6), with_exceptions(6)))
    assert plan.predicted.step < before.predicted.step
    assert plan.predicted.peak <= budget * MIB
    assert plan.bound <= plan.predicted.step
    used = {row.decision for row in plan.rows if excepted_part(row.decision)}
    assert used & {MOVED, PRODUCTS, ATTENTION}
    assert all(decision in explain(plan) for decision in used)
    assert str(Rules.parse(plan.text)) == plan.text
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan


def test_optimal_as_all_choices_enumerated():
    feasible = chosen = 0
    for seed in range(50):
        rng = random.Random(seed)
        made = with_exceptions(rng.randint(2, 3))
        known = made.figures["Block"]
        drawn = {decision: known[decision] for decision in rng.sample([*known][1:], 5)} | {KEEP: known[KEEP]}
        drawn |= {
            decision: figures(
                decision, rng.randint(1, 60) * MIB, rng.uniform(0.5, 10), transient=rng.randint(0, 90) * MIB
            )
            for decision in rng.sample([ATTENTION, PRODUCTS, MOVED], 2)
        }
        chain = chain_of(Profile(**vars(made) | {"figures": made.figures | {"Block": drawn}}))
        limits = limits_of(rng.uniform(100, 350) * MIB, None, None, 0.0)
        expected = enumerated(chain, limits)
        try:
            solution = solve(chain, limits, gap=0.0)
        except CapacityError:
            assert expected == inf
            continue
        assert solution.evaluation.total == pytest.approx(expected, rel=1e-6), seed
        assert solution.bound == pytest.approx(expected, rel=2e-5)
        feasible += 1
        options = (layer.options[at] for layer, at in zip(chain.layers, solution.choice, strict=True))
        chosen += any(excepted_part(option.decision) for option in options)
    assert feasible > 20
    assert chosen > 10
