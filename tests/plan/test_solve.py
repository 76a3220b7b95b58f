"""Plans against all choices there are; more memory, faster links, more options; certificates and refusals."""

import random
import sys
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actstore.errors import CapacityError, ConfigError
from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits, Links, useful
from actstore.plan.solver.least import least
from actstore.plan.solver.linear import Linear
from actstore.plan.solver.search import Search
from actstore.plan.solver.solve import MIB, pareto, solve
from actstore.plan.solver.tables import Tables
from actstore.plan.solver.timeline import evaluated
from tests.plan.chains import crowded_chain, enumerated, random_chain, random_limits

GIB = 2**30


def case(seed, least_layers=3, most_layers=5, most_options=6):
    rng = random.Random(seed)
    chain = random_chain(rng, rng.randint(least_layers, most_layers), most_options)
    return chain, random_limits(rng, chain)


def best(chain, limits):
    """The time of the proven optimum; infinite where none keeps the limits."""
    try:
        solution = solve(chain, limits, gap=0.0)
    except CapacityError:
        return inf
    assert solution.evaluation.feasible
    assert solution.bound == pytest.approx(solution.evaluation.total, rel=2e-5)
    return solution.evaluation.total


def test_optimal_as_all_choices_enumerated():
    feasible = 0
    for seed in range(200):
        chain, limits = case(seed, most_options=5 if seed % 5 else 4)
        if seed % 4 == 0:
            chain, limits, _ = crowded_chain(random.Random(seed), 4)
        expected = enumerated(chain, limits)
        assert best(chain, limits) == pytest.approx(expected, rel=1e-6), seed
        feasible += expected < inf
    assert feasible > 100


def stay(search, choice):
    """In place of a search."""
    found = evaluated(search.tables, choice)
    return (choice, found.total) if found.feasible else None


def test_the_solver_betters_a_poor_choice(monkeypatch):
    """Options that its prices leave out, given any choice to begin with, are in no best plan."""

    monkeypatch.setattr(Search, "improve", stay)
    ways = set()
    for seed in range(60):
        chain, limits = case(seed) if seed % 4 else crowded_chain(random.Random(seed), 4)[:2]
        expected = enumerated(chain, limits)
        assert best(chain, limits) == pytest.approx(expected, rel=1e-6), seed
        if expected < inf:
            ways.add(solve(chain, limits, gap=0.0).how)
    assert ways == {"everything fits", "local search", "mixed-integer program"}


def test_a_plan_that_is_good_enough_has_a_true_bound(monkeypatch):
    monkeypatch.setattr(Search, "improve", stay)
    below = 0
    for seed in range(60):
        chain, limits = case(seed) if seed % 4 else crowded_chain(random.Random(seed), 4)[:2]
        expected = enumerated(chain, limits)
        if expected == inf:
            continue
        for gap in (0.02, 0.2):
            # nothing faster within the gap of a good choice: the solver proves that, and no more
            solution = solve(chain, limits, gap=gap)
            assert solution.bound <= expected * (1 + 1e-6), seed
            assert solution.gap <= gap + 2e-5, seed
            below += expected < solution.evaluation.total * (1 - 1e-6)
    assert below > 0


def test_least_memory_as_all_choices_enumerated():
    for seed in range(60):
        chain, limits = case(seed, most_layers=4, most_options=4)
        try:
            found = least(chain, limits)
        except CapacityError:
            assert enumerated(chain, replace(limits, device=inf)) == inf, seed
            continue
        assert found.evaluation.feasible, seed
        assert enumerated(chain, replace(limits, device=found.device)) < inf, seed
        assert enumerated(chain, replace(limits, device=found.device * (1 - 1e-4) - 1e-3)) == inf, seed


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(["device", "host", "disk", "error"]), st.floats(1, 3))
def test_a_larger_limit_never_makes_a_step_longer(seed, name, factor):
    chain, limits = case(seed)
    larger = replace(limits, **{name: getattr(limits, name) * factor})
    assert best(chain, larger) <= best(chain, limits) * (1 + 1e-6)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(["out", "back", "disk_out", "disk_back"]), st.floats(1, 10))
def test_a_faster_link_never_makes_a_step_longer(seed, name, factor):
    chain, limits = case(seed)
    faster = replace(chain, links=replace(chain.links, **{name: getattr(chain.links, name) * factor}))
    assert best(faster, limits) <= best(chain, limits) * (1 + 1e-6)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_another_option_never_makes_a_step_longer(seed, other):
    chain, limits = case(seed)
    more, _ = case(other, least_layers=len(chain.layers), most_layers=len(chain.layers))
    assume(more.links.on_host == chain.links.on_host)
    layers = tuple(
        replace(a, options=a.options + tuple(o for o in b.options if a.forward + o.forward >= 0))
        for a, b in zip(chain.layers, more.layers, strict=True)
    )
    assert best(replace(chain, layers=layers), limits) <= best(chain, limits) * (1 + 1e-6)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_options_that_are_left_out_change_no_optimum(seed, rng):
    chain, limits = case(seed, most_layers=4, most_options=3)
    fields = ("held", "link", "host", "disk", "forward", "backward", "forward_peak", "backward_peak", "error")

    def worse(option):
        more = {name: getattr(option, name) + rng.choice([0, 0, 1.5, 40]) for name in fields}
        more["link"] = max(more["link"], more["disk"])
        peak = max(more["held"], more["forward_peak"], more["backward_peak"])
        return replace(option, **more | {"forward_peak": peak, "backward_peak": peak})

    layers = tuple(
        replace(layer, options=tuple(rng.sample(both := (*layer.options, worse(layer.options[0])), len(both))))
        for layer in chain.layers
    )
    full = replace(chain, layers=layers)
    kept = tuple(replace(layer, options=tuple(layer.options[o] for o in useful(layer))) for layer in layers)
    assert sum(len(layer.options) for layer in kept) < sum(len(layer.options) for layer in layers)
    assert enumerated(replace(full, layers=kept), limits) == pytest.approx(enumerated(full, limits))


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_no_plan_is_below_the_relaxation(seed):
    chain, limits = case(seed)
    tables = Tables(chain, limits)
    bound = Linear(tables, [range(n) for n in tables.counts]).relaxed().bound + tables.plain
    assert best(chain, limits) >= bound * (1 - 1e-6)


def knapsack(chain, limit):
    """Least compute where nothing leaves the device, by held bytes; the last layer's event is the peak."""
    reached = {0: 0.0}
    for layer in chain.layers:
        after = {}
        for held, time in reached.items():
            for option in layer.options:
                if held + option.forward_peak <= limit:
                    key, cost = held + option.held, time + option.forward + option.backward
                    after[key] = min(cost, after.get(key, inf))
        reached = after
    return chain.plain + min(reached.values(), default=inf)


def test_without_links_a_knapsack():
    for seed in range(12):
        rng = random.Random(seed)
        chain = random_chain(rng, 14)
        layers = tuple(
            replace(layer, options=(*(o for o in layer.options if not o.link + o.host + o.disk), KEEP))
            for layer in chain.layers
        )
        chain = LayerChain(layers)
        whole = sum(max(o.held for o in layer.options) for layer in layers)
        limit = float(round(whole * rng.uniform(0.4, 0.8)) + 400)
        assert best(chain, Limits(limit)) == pytest.approx(knapsack(chain, limit)), seed


KEEP = LayerOption("keep", 100, forward_peak=100, backward_peak=100)


def test_equal_layers_are_proven():
    layers = tuple(
        Layer(f"blocks.{i}", 10, 20, _transformer_options(GIB, GIB // 17, 10, 0.86)) for i in range(48)
    )  # fmt: skip
    chain = LayerChain(layers, Links(25e6, 25e6))
    solution = solve(chain, Limits(14 * GIB), time_limit=60)
    assert solution.gap <= 0.002


def _transformer_options(size, small, forward, codec):
    peak = {"forward_peak": size, "backward_peak": size}
    half = size / 2
    more = {"forward_peak": size + half, "backward_peak": size + half, "forward": codec, "backward": codec, "error": 1}
    return (
        LayerOption("keep", size, **peak),
        LayerOption("recompute", small, backward=forward, **peak),
        LayerOption("recompute(raw @ host)", 0, small, small, backward=forward, **peak),
        LayerOption("raw @ host", 0, size, size, **peak),
        LayerOption("int8", half, **more),
        LayerOption("int8 @ host", 0, half, half, **more),
    )


def transformer(layers=12):
    rng = random.Random(1)
    sizes = [GIB * rng.uniform(0.7, 1.4) for _ in range(layers)]
    return LayerChain(
        tuple(
            Layer(f"blocks.{i}", 10 * s / GIB, 20 * s / GIB, _transformer_options(s, s / 17, 10 * s / GIB, s / GIB))
            for i, s in enumerate(sizes)
        ),
        Links(25e6, 25e6),
    )


def test_prices_are_what_a_little_more_saves():
    chain, limits = transformer(), Limits(3 * GIB, host=GIB, error=3)
    _check_prices(chain, limits, "device", "host", "error")
    to_disk = tuple(
        replace(layer, options=tuple(replace(o, host=0, disk=o.host) for o in layer.options)) for layer in chain.layers
    )
    slow = Links(25e6, 25e6, 20e6, 20e6)
    _check_prices(LayerChain(to_disk, slow), Limits(3 * GIB, host=GIB / 8, disk=GIB), "device", "disk")
    _check_prices(
        LayerChain(to_disk, slow), Limits(6 * GIB, host=GIB / 8, disk=9 * GIB, error=3), "device", "host", "error"
    )


def _check_prices(chain, limits, *positive):
    def bound(changed):
        tables = Tables(chain, changed)
        return Linear(tables, [useful(layer) for layer in chain.layers]).relaxed().bound

    prices = solve(chain, limits, gap=0.5).prices
    assert {name for name, price in prices.items() if price > 0} == set(positive)
    for name in positive:
        step = MIB if name != "error" else 1e-3
        more, fewer = (replace(limits, **{name: getattr(limits, name) + sign * step}) for sign in (1, -1))
        units = 1 if name != "error" else step
        assert prices[name] * units == pytest.approx((bound(fewer) - bound(more)) / 2, rel=1e-3), name


def test_the_certificate():
    solution = solve(transformer(), Limits(4 * GIB))
    total, bound = solution.evaluation.total, solution.bound
    assert solution.certificate == (
        f"predicted {total:.1f} ms, bound {bound:.1f} ms, within {100 * (total - bound) / total:.2f} % of optimal"
    )
    assert 0 <= solution.gap <= 0.002


def test_everything_fits():
    solution = solve(transformer(), Limits(100 * GIB))
    assert solution.how == "everything fits"
    assert solution.choice == (0,) * 12
    assert solution.certificate.endswith("within 0.00 % of optimal")
    assert solution.prices == {"device": 0.0}


def test_the_same_plan_each_time():
    chain = transformer()
    assert solve(chain, Limits(4 * GIB)) == solve(chain, Limits(4 * GIB))


def test_too_little_memory_says_how_much_is_needed_and_where():
    layers = [*transformer().layers]
    big = LayerOption("recompute", GIB, backward=5, forward_peak=4 * GIB, backward_peak=6 * GIB)
    layers[7] = Layer("head", 10, 20, (big,))
    chain = LayerChain(tuple(layers), Links(25e6, 25e6))
    with pytest.raises(CapacityError) as refused:
        solve(chain, Limits(5 * GIB))
    assert str(refused.value) == (
        "no plan fits into 5.0 GiB of device memory: at least 6.0 GiB are needed, in backward of head. "
        "Raise the limit by 1.0 GiB, use a smaller batch, or give head an option that needs less there."
    )
    assert refused.value.least == 6 * GIB
    assert solve(chain, Limits(6 * GIB)).evaluation.device_peak <= 6 * GIB


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(inf, host=GIB), "comes to at least 2.0 GiB of host memory, where 1.0 GiB are allowed, most of it in a"),
        (Limits(inf, disk=GIB), "comes to at least 2.0 GiB on the disk, where 1.0 GiB are allowed, most of it in a"),
        (Limits(inf, error=1), "comes to at least error 2 where 1 is allowed, most of it in a"),
    ],
)
def test_a_limit_that_no_choice_keeps(limits, words):
    option = LayerOption("x", 0, 2 * GIB, 2 * GIB, 2 * GIB, error=2)
    with pytest.raises(CapacityError, match=words):
        solve(LayerChain((Layer("a", 1, 1, (option,)),), Links(1e9, 1e9)), limits)


def test_limits_that_exclude_each_other():
    to_host, to_disk = (
        LayerOption("raw @ host", 0, 100, 100, forward_peak=100, backward_peak=100),
        LayerOption("raw @ disk", 0, 100, disk=100, forward_peak=100, backward_peak=100),
    )
    chain = LayerChain((Layer("a", 1, 1, (to_host, to_disk)),) * 3)
    with pytest.raises(CapacityError, match="no choice of options keeps the other limits"):
        solve(chain, Limits(inf, host=100, disk=100))


def test_without_scipy(monkeypatch):
    chain, limits = transformer(), Limits(4 * GIB)
    optimum = solve(chain, limits).evaluation.total
    monkeypatch.setitem(sys.modules, "scipy", None)
    solution = solve(chain, limits)
    assert solution.certificate == (
        f"predicted {solution.evaluation.total:.1f} ms, no bound: scipy is not installed (pip install 'actstore[plan]')"
    )
    assert solution.evaluation.feasible
    assert optimum <= solution.evaluation.total <= 1.05 * optimum
    assert solve(chain, Limits(100 * GIB)).gap == 0
    with pytest.raises(CapacityError, match="no plan fits into"):
        solve(chain, Limits(GIB / 4))
    with pytest.raises(ConfigError, match=r"pip install 'actstore\[plan\]'"):
        Linear(Tables(chain, limits), [useful(layer) for layer in chain.layers]).relaxed()


def test_a_front_of_memory_and_time():
    chain = transformer()
    front = pareto(chain, Limits(inf), 8)
    assert len(front) > 4
    for before, after in pairwise(front):
        assert before.device < after.device
        assert before.solution.evaluation.total > after.solution.evaluation.total
    for point in front:
        assert point.solution.evaluation.device_peak <= point.device * (1 + 1e-9)
    assert front[0].device == pytest.approx(least(chain, Limits(inf)).device)
    assert front[-1].solution.evaluation.overhead == 0
    assert pareto(chain, Limits(5 * GIB), 4)[-1].device == 5 * GIB
    with pytest.raises(CapacityError, match="no plan fits into"):
        pareto(chain, Limits(GIB), 4)
    with pytest.raises(ConfigError, match="points=1: must be 2 or more"):
        pareto(chain, Limits(inf), 1)


def test_a_chain_without_layers():
    solution = solve(LayerChain((), rest=3.0), Limits(0))
    assert solution.choice == ()
    assert solution.evaluation.total == 3.0
    with pytest.raises(ConfigError, match="without layers"):
        least(LayerChain(()), Limits(0))
