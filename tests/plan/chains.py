"""Random chains: all kinds of options, both lanes, all limits."""

import random
from itertools import product
from math import inf

from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits, Links
from actstore.plan.solver.tables import Tables
from actstore.plan.solver.timeline import evaluated


def random_chain(rng: random.Random, layers: int, most_options: int = 6) -> LayerChain:
    on_host = rng.random() < 0.25
    return LayerChain(
        tuple(_layer(rng, i, most_options, on_host) for i in range(layers)),
        Links(*(rng.choice([inf, 5, 20, 50]) for _ in range(4)), on_host),
        rest=rng.choice([0.0, 5.0]),
    )


def _layer(rng, index, most_options, on_host):
    size, small = rng.choice([0, 64, 100, 300]), 8
    forward, backward = rng.choice([0, 3, 7.5, 10]), rng.choice([5, 12, 20])
    quarter = size / 4
    codec = {"forward": 0.5, "backward": 0.75, "error": 1}
    link = 0 if on_host else 1
    options = [
        LayerOption("keep", size, **_peaks(size)),
        LayerOption("recompute", min(small, size), backward=forward, **_peaks(size)),
        LayerOption("recompute(raw @ host)", 0, link * small, small, backward=forward, **_peaks(size)),
        LayerOption("int8", quarter, **codec, **_peaks(size + quarter)),
        LayerOption("raw @ host", 0, link * size, size, **_peaks(size)),
        LayerOption("int8 @ host", 0, link * quarter, quarter, **codec, **_peaks(size + quarter)),
        LayerOption("raw @ disk", 0, link * size, disk=size, **_peaks(size)),
        LayerOption("int8 @ disk", 0, link * quarter, disk=quarter, **codec, **_peaks(size + quarter)),
    ]
    return Layer(f"blocks.{index}", forward, backward, tuple(rng.sample(options, rng.randint(1, most_options))))


def _peaks(size):
    return {"forward_peak": size, "backward_peak": size}


def random_limits(rng: random.Random, chain: LayerChain) -> Limits:
    whole = sum(max(option.forward_peak for option in layer.options) for layer in chain.layers)
    return Limits(
        whole * rng.uniform(0.2, 0.9) + 100,
        rng.choice([inf, whole * rng.uniform(0.1, 1)]),
        rng.choice([inf, whole * rng.uniform(0.2, 1)]),
        rng.choice([inf, len(chain.layers) // 2]),
    )


def crowded_chain(rng: random.Random, layers: int) -> tuple[LayerChain, Limits, list[int]]:
    """A chain whose disk is slower than its link, a choice, and limits with little to spare for it on the device and
    in host memory."""
    peaks = _peaks(100)
    kinds = (
        LayerOption("keep", 100, **peaks),
        LayerOption("raw @ host", 0, 100, 100, **peaks),
        LayerOption("raw @ disk", 0, 100, disk=100, **peaks),
        LayerOption("int8 @ disk", 0, 40, disk=40, **peaks),
    )
    chain = LayerChain(
        tuple(Layer(f"blocks.{i}", rng.choice([0, 1, 2]), rng.choice([1, 2, 3]), kinds) for i in range(layers)),
        Links(rng.choice([20, 50, inf]), rng.choice([20, 50, inf]), rng.choice([5, 10, 30]), rng.choice([5, 10, 30])),
    )
    choice = rng.choices(range(4), weights=(1, 2, 4, 2), k=layers)
    chosen = [kinds[o] for o in choice]
    needed = 100 + sum(option.held for option in chosen[:-1])
    host = sum(option.host for option in chosen)
    return chain, Limits(needed + rng.randint(0, 150), host + rng.randint(0, 120)), choice


def enumerated(chain: LayerChain, limits: Limits) -> float:
    """The least time of all choices; infinite where none keeps the limits."""
    tables = Tables(chain, limits)
    found = (evaluated(tables, choice) for choice in product(*(range(len(layer.options)) for layer in chain.layers)))
    return min((evaluation.total for evaluation in found if evaluation.feasible), default=inf)
