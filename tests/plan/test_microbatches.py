"""Plans beside micro-batches that wait, against bytes counted one by one."""

import random
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from actstore.errors import CapacityError
from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits
from actstore.plan.solver.microbatches import beside_others, solve_step
from actstore.plan.solver.solve import solve
from actstore.plan.solver.timeline import evaluate


def random_chain(rng, waiting):
    layers = []
    for number in range(rng.randint(1, 4)):
        options = [LayerOption("keep", whole := 12.0 * rng.randint(1, 9), forward_peak=whole, backward_peak=whole)]
        for other in range(rng.randint(0, 2)):
            held, extra = 12.0 * rng.randint(0, int(whole) // 12), float(rng.randint(0, 60))
            options.append(
                LayerOption(str(other), held, 0, 0, 0, 0, rng.random(), forward_peak=held, backward_peak=held + extra)
            )
        layers.append(Layer(str(number), 1.0, 2.0, tuple(options), waiting))
    return LayerChain(tuple(layers))


def counted(chain, choice, waiting):
    """The peak of `waiting` forwards and then of their backwards, the first one first."""
    chosen = [layer.options[o] for layer, o in zip(chain.layers, choice, strict=True)]
    held = peak = 0.0
    for _ in range(waiting):
        for option in chosen:
            peak = max(peak, held + option.forward_peak - option.held * (waiting - 1) / waiting)
            held += option.held / waiting
    for _ in range(waiting):
        for option in reversed(chosen):
            peak = max(peak, held + option.backward_peak - option.held)
            held -= option.held / waiting
    assert held == pytest.approx(0.0)
    return peak


@pytest.mark.parametrize("waiting", [1, 2, 4])
def test_bytes_as_counted(waiting):
    for seed in range(100):
        chain = random_chain(random.Random(seed), waiting)
        for choice in product(*(range(len(layer.options)) for layer in chain.layers)):
            found = beside_others(chain, evaluate(chain, choice, Limits(inf)), Limits(inf))
            assert found.device_peak == pytest.approx(counted(chain, choice, waiting)), (seed, choice)


def least_of(chain, limits):
    """The least that an error names; 0 where there is none."""
    try:
        solve_step(chain, limits)
    except CapacityError as refused:
        return refused.facts["least"]
    return 0.0


@pytest.mark.parametrize("waiting", [2, 4])
def test_plans_keep_their_limits(waiting):
    refused = lowered = 0
    for seed in range(300):
        rng = random.Random(seed)
        chain = random_chain(rng, waiting)
        peaks = [counted(chain, c, waiting) for c in product(*(range(len(layer.options)) for layer in chain.layers))]
        limits = Limits(rng.uniform(0.7 * min(peaks), max(peaks)))
        least = least_of(chain, limits)
        refused += least > 0
        limits = replace(limits, device=max(limits.device, least))
        found = solve_step(chain, limits)
        assert found.evaluation.feasible
        assert counted(chain, found.choice, waiting) <= limits.device * (1 + 1e-6)
        lowered += not beside_others(chain, solve(chain, limits).evaluation, limits).feasible
    assert min(refused, lowered) > 5


def test_a_chain_of_one_backward_is_solved_as_before():
    chain = random_chain(random.Random(0), 1)
    limits = Limits(solve(chain, Limits(inf)).evaluation.device_peak)
    assert solve_step(chain, limits) == solve(chain, limits)
    evaluation = evaluate(chain, [0] * len(chain.layers), limits)
    assert beside_others(chain, evaluation, limits) is evaluation
