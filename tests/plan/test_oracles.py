"""Chains of equal layers whose best plan has a formula; the general solver must find its value."""

from math import ceil, floor, inf

import pytest

from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits, Links
from actstore.plan.solver.least import least
from actstore.plan.solver.solve import solve

# Backward is long enough that what left in forward comes back in time: the formulas count one direction.
BACKWARD = 2.0


def equal_layers(n, forward, *options, rate=inf, backward=BACKWARD):
    return LayerChain(tuple(Layer(f"{i}", forward, backward * forward, options) for i in range(n)), Links(rate, rate))


def keep(size):
    return LayerOption("keep", size, forward_peak=size, backward_peak=size)


def recompute(size, small, time):
    return LayerOption("recompute", small, backward=time, forward_peak=size, backward_peak=size)


def recompute_offloaded(size, small, time):
    return LayerOption(
        "recompute(raw @ host)", 0, small, small, backward=time, forward_peak=size, backward_peak=size
    )  # fmt: skip


def offload(size):
    return LayerOption("raw @ host", 0, size, size, forward_peak=size, backward_peak=size)


@pytest.mark.parametrize(
    ("n", "f", "size", "small", "limit", "recomputed"),
    [(8, 10, 100, 10, 450, 4), (16, 14, 900, 33, 5400, 11), (32, 10, 400, 16, 4000, 23), (48, 7, 300, 12, 5000, 33),
     (12, 3, 64, 4, 300, 8)],
)  # fmt: skip
def test_keep_or_recompute(n, f, size, small, limit, recomputed):
    assert ceil((n * size - limit) / (size - small)) == recomputed
    solution = solve(equal_layers(n, f, keep(size), recompute(size, small, f)), Limits(limit), gap=0.0)
    assert solution.evaluation.overhead == pytest.approx(recomputed * f)
    assert solution.bound == pytest.approx(solution.evaluation.total, rel=2e-5)


@pytest.mark.parametrize(
    ("n", "f", "size", "rate", "layers"),
    [(8, 10, 100, 20, 2), (16, 14, 900, 25, 11), (32, 10, 400, 20, 17), (12, 10, 600, 20, 9), (64, 10, 800, 20, 49),
     (32, 14, 900, 50, 8.667), (20, 8, 500, 40, 8.48)],
)  # fmt: skip
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_least_memory_of_offloading_without_a_stall(n, f, size, rate, layers, backward):
    k = size / (rate * f)
    formula = 2 * size if k <= 1 else n * size - min(floor((n - 1) / k) * size, (n - 2) * size / k)
    assert formula / size == pytest.approx(layers, abs=5e-4)
    chain = equal_layers(n, f, keep(size), offload(size), rate=rate, backward=backward)
    found = least(chain, Limits(inf), within=chain.plain)
    assert found.device == pytest.approx(formula, rel=1e-6)
    assert found.evaluation.total == pytest.approx(chain.plain)


def mixed(n, f, size, small, limit, rate):
    """The best of all counts of layers that are offloaded, and recomputed with their input there or kept."""
    best = inf
    for offloaded in range(n):
        for inputs in range(n - offloaded):
            for kept_inputs in range(n - offloaded - inputs):
                leaving = offloaded * size + inputs * small
                resident = n * size - (offloaded + inputs) * size - kept_inputs * (size - small)
                if resident <= limit:
                    at_the_last = resident + max(0, leaving - rate * f * (n - 2)) - limit
                    stall = max(0, at_the_last / rate, (leaving - rate * f * (n - 1)) / rate)
                    best = min(best, f * (inputs + kept_inputs) + stall)
    return best


@pytest.mark.parametrize(
    ("n", "f", "size", "small", "limit", "rate", "overhead"),
    [(8, 10, 200, 10, 800, 10, 11), (16, 14, 900, 33, 5400, 25, 70), (24, 10, 600, 20, 4200, 20, 100),
     (32, 14, 900, 33, 9000, 25, 154), (32, 10, 400, 16, 4000, 20, 75.6), (12, 5, 120, 8, 480, 12, 17)],
)  # fmt: skip
def test_keep_recompute_and_offload_mixed(n, f, size, small, limit, rate, overhead):
    assert mixed(n, f, size, small, limit, rate) == pytest.approx(overhead)
    options = keep(size), recompute(size, small, f), recompute_offloaded(size, small, f), offload(size)
    solution = solve(equal_layers(n, f, *options, rate=rate), Limits(limit), gap=0.0, time_limit=60)
    assert solution.evaluation.overhead == pytest.approx(overhead, rel=1e-6)
    assert solution.bound == pytest.approx(solution.evaluation.total, rel=2e-5)
