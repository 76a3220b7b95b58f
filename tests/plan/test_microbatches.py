"""Plans beside micro-batches that wait, against bytes counted one by one."""

import random
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from actstore.errors import CapacityError
from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits
from actstore.plan.solver.microbatches import beside_others, evaluate_step, solve_step
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


def with_turns(rng, chain):
    """The chain with layers of two stages, each of which has its most micro-batches at turns of its own."""
    stages = [tuple(rng.randint(0, 6) for _ in range(3)) for _ in range(2)]
    layers = [
        replace(layer, waiting=max(1, *turns), turns=turns) for layer in chain.layers for turns in [rng.choice(stages)]
    ]
    return replace(chain, layers=tuple(layers))


def counted_at_turns(chain, choice):
    """The most that all hold at one turn, and beside it the most that one needs while it runs."""
    layers = list(zip(chain.layers, choice, strict=True))
    fullest = max(
        sum(
            layer.options[o].held * (layer.turns[turn] / max(layer.turns) if any(layer.turns) else 1)
            for layer, o in layers
        )
        for turn in range(3)
    )
    needs = [max(o.forward_peak, o.backward_peak) - o.held for layer, i in layers for o in [layer.options[i]]]
    return fullest + max(needs)


def test_stages_with_turns_of_their_own_share_the_memory():
    """Plans keep the limit at each turn, never beat their bound, and are mostly the fastest there is."""
    best = several = 0
    for seed in range(70):
        rng = random.Random(seed)
        chain = with_turns(rng, random_chain(rng, 1))
        choices = list(product(*(range(len(layer.options)) for layer in chain.layers)))
        peaks = {choice: counted_at_turns(chain, choice) for choice in choices}
        limits = Limits(rng.uniform(min(peaks.values()), max(peaks.values())))
        least = least_of(chain, limits)
        limits = replace(limits, device=max(limits.device, least))
        found = solve_step(chain, limits)
        assert found.evaluation.feasible
        assert found.evaluation.device_peak == pytest.approx(peaks[found.choice])
        assert peaks[found.choice] <= limits.device * (1 + 1e-6)
        times = {choice: evaluate_step(chain, choice, Limits(inf)).total for choice in choices}
        fastest = min(times[choice] for choice in choices if peaks[choice] <= limits.device)
        assert found.bound is None or found.bound <= fastest + 1e-6
        several += fastest > chain.plain
        best += fastest > chain.plain and found.evaluation.total <= fastest + 1e-6
    assert several > 15
    assert best > 0.8 * several


def test_a_turn_that_fits_beside_others_counts_once():
    """Two stages that never hold their most at once fit where their sum would not."""
    option = LayerOption("keep", 60.0, forward_peak=60.0, backward_peak=60.0)
    less = LayerOption("recompute", 0.0, backward=5.0, forward_peak=60.0, backward_peak=60.0)
    layers = [Layer(name, 1.0, 2.0, (option, less), 6, turns) for name, turns in (("a", (6, 2)), ("b", (2, 6)))]
    chain = LayerChain(tuple(layers))
    assert solve_step(chain, Limits(80.0)).choice == (0, 0)
    assert solve_step(chain, Limits(79.0)).choice != (0, 0)
    with pytest.raises(CapacityError):
        solve_step(chain, Limits(59.0))
