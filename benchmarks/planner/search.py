"""Time to find a plan, and the proven distance from the best plan: ``python -m benchmarks.planner.search``.

Blocks as a transformer has them, of unequal size, each with the choice to keep, recompute (with its input on the device
or in host memory), encode to half the bytes, offload, and encode and offload. Budgets are a share of what all
activations take, and two blocks more. "equal" chains have 32 to 64 blocks of one size. "noisy" chains are equal up to
2 %, as measured ones are. Times and sizes are synthetic; none is measured of a model.
"""

from __future__ import annotations

import argparse
import json
import random
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from actstore.bench.environment import environment
from actstore.plan.solver.chain import Layer, LayerChain, LayerOption, Limits, Links, useful
from actstore.plan.solver.linear import Linear
from actstore.plan.solver.program import optimizer
from actstore.plan.solver.solve import solve
from actstore.plan.solver.tables import Tables

SIZES = (32, 128, 1024)
EQUAL = (32, 48, 64)
BUDGETS = (0.5, 0.25, 0.1)
BLOCK_NBYTES = 800e6  # bytes that a block saves
INPUT_SHARE = 1 / 17  # fraction of them that its input takes
CODEC_BYTES_PER_MS = 1.25e9  # bytes/ms
LINK_BYTES_PER_MS = 25e6  # bytes/ms, each way


def chain_of(layers: int, spread: float, seed: int = 0) -> LayerChain:
    """Return blocks whose sizes and times differ by the factor `1 + spread` either way."""
    rng = random.Random(seed)

    def some(value: float) -> float:
        return value * (1 + spread) ** rng.uniform(-1, 1)

    blocks = []
    for i in range(layers):
        width = some(1.0)
        size, forward, backward = some(BLOCK_NBYTES * width), some(10 * width), some(20 * width)
        codec = {"forward": size / CODEC_BYTES_PER_MS, "backward": size / CODEC_BYTES_PER_MS, "error": 1.0}
        plain = {"forward_peak": size, "backward_peak": size}
        wide = {"forward_peak": 1.5 * size, "backward_peak": 1.5 * size}
        small, half = INPUT_SHARE * size, size / 2
        options = (
            LayerOption("keep", size, **plain),
            LayerOption("recompute", small, backward=forward, **plain),
            LayerOption("recompute(raw @ host)", 0, small, small, backward=forward, **plain),
            LayerOption("raw @ host", 0, size, size, **plain),
            LayerOption("int8", half, **codec, **wide),
            LayerOption("int8 @ host", 0, half, half, **codec, **wide),
        )
        blocks.append(Layer(f"blocks.{i}", forward, backward, options))
    return LayerChain(tuple(blocks), Links(LINK_BYTES_PER_MS, LINK_BYTES_PER_MS), rest=30.0)


def row_of(name: str, chain: LayerChain, budget: float, time_limit: float) -> dict[str, Any]:
    """Return one plan, with the seconds of its parts."""
    sizes = [layer.options[0].held for layer in chain.layers]
    limits = Limits(budget * sum(sizes) + 2 * max(sizes))
    begin = perf_counter()
    tables = Tables(chain, limits)
    Linear(tables, [useful(layer) for layer in chain.layers]).relaxed()
    relaxed = perf_counter()
    solution = solve(chain, limits, time_limit=time_limit)
    end = perf_counter()
    return {
        "chain": name,
        "layers": len(sizes),
        "budget": budget,
        "relaxation_s": relaxed - begin,
        "plan_s": end - relaxed,
        "plain_ms": chain.plain,
        "predicted_ms": solution.evaluation.total,
        "bound_ms": solution.bound,
        "gap": solution.gap,
        "how": solution.how,
        "ms_per_GiB": solution.prices["device"] * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/intel-xeon-2-cores/planner.json"))
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for search and solver of one plan")
    options = parser.parse_args()

    optimizer()  # the import takes a second
    cases = [("mixed", chain_of(n, 0.4)) for n in SIZES] + [("equal", chain_of(n, 0.0)) for n in EQUAL]
    cases += [("noisy", chain_of(n, 0.02)) for n in EQUAL]
    rows = [row_of(name, chain, budget, options.time_limit) for name, chain in cases for budget in BUDGETS]
    options.output.write_text(
        json.dumps({"environment": {**environment(), "scipy": version("scipy")}, "rows": rows}, indent=1) + "\n"
    )

    table = Table("chain", "layers", "budget", "relaxation", "plan", "overhead", "gap", "found by", "+1 GiB saves")
    for row in rows:
        table.add_row(
            row["chain"],
            str(row["layers"]),
            f"{row['budget']:.0%}",
            f"{row['relaxation_s']:.2f} s",
            f"{row['plan_s']:.2f} s",
            f"{row['predicted_ms'] / row['plain_ms'] - 1:.2%}",
            f"{row['gap']:.3%}",
            row["how"],
            f"{row['ms_per_GiB']:.1f} ms",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
