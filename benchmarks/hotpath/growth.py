"""Growth of a store's overhead with tensors, modules and steps: ``python -m benchmarks.hotpath.growth``.

tensors, modules   microseconds that a store adds to forward and backward, for each tensor or each call of a module that
                   saves one: least of several steps, less the least of the same steps without a store
steps              milliseconds of a step, and the growth of Python's memory blocks after each, over longer and longer
                   windows of steps of one store

The slope is that of the logarithm of the figure over the logarithm of the number: 0 is flat; 1 is a cost for each
tensor that doubles when their number does. Times are processor time of the training thread, without Python's garbage
collector, whose visits to all live handles take longer the more handles there are.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import linear_regression, median
from time import thread_time
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from actstore import ActivationStore
from actstore.bench.environment import environment

FLAT_SLOPE = 0.15  # the largest slope that counts as flat: caches hold a smaller part of a larger number
BLOCKS = "blocks left"
MAX_BLOCKS_LEFT = 0.5  # blocks that a step may leave in the last window: one each would be a leak
POLICIES = ("keep", "int8", "recompute")
SIZES = {"tensors": (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000), "modules": (10, 30, 100, 300, 1_000, 3_000)}
STEPS = (10, 30, 100, 300, 1_000)
REPEATS = 3


class Sines(nn.Module):
    """One module whose `count` operators each save a tensor, side by side: chains of 100,000 are another subject."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        if self.count == 1:
            return x.sin()
        return torch.stack([(x + i).sin() for i in range(self.count)])


def tensors_of(count: int) -> nn.Module:
    return Sines(count)


def modules_of(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(Sines(1), nn.PReLU()) for _ in range(count)))


MODELS = {"tensors": tensors_of, "modules": modules_of}


def step(model: nn.Module, x: Tensor, context: AbstractContextManager[Any]) -> float:
    """Return seconds of forward and backward."""
    start = thread_time()
    with context:
        loss = model(x).sum()
    loss.backward()
    return thread_time() - start


def added_us(kind: str, count: int, policy: str) -> float:
    """Return the microseconds that a store adds for each of `count` tensors or modules."""
    model, x = MODELS[kind](count), torch.ones(8, requires_grad=True)
    store = ActivationStore(model, policy, min_bytes=0)
    times: dict[bool, list[float]] = {False: [], True: []}
    gc.collect()
    gc.disable()
    try:
        for _ in range(REPEATS):
            for stored, found in times.items():
                found.append(step(model, x, store if stored else nullcontext()))
    finally:
        gc.enable()
    store.close()
    return (min(times[True]) - min(times[False])) / count * 1e6


def over_steps(policy: str, most: int) -> dict[str, list[float]]:
    """Return milliseconds of a step and blocks of Python's memory that it leaves, in the windows between `STEPS`."""
    model, x = modules_of(10), torch.ones(8, requires_grad=True)
    store = ActivationStore(model, policy, min_bytes=0)
    found: dict[str, list[float]] = {"steps": [], "ms": [], "blocks": []}
    for _ in range(3):
        step(model, x, store)
    before = 0
    for done, end in pairwise((0, *(s for s in STEPS if s <= most))):
        found["steps"].append(end)
        found["ms"].append(median(step(model, x, store) for _ in range(end - done)) * 1e3)
        gc.collect()
        now = sys.getallocatedblocks()
        found["blocks"].append((now - before) / (end - done))
        before = now
    store.close()
    found["blocks"][0] = 0.0  # the first steps learn, and keep what they learned
    return found


def slope(counts: list[float], figures: list[float]) -> float:
    """Return the exponent by which a figure grows."""
    return linear_regression([log(c) for c in counts], [log(max(f, 1e-3)) for f in figures]).slope


def measure(most: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return one row for each kind and policy; counts above `most` are left out."""
    rows = []
    for kind, sizes in SIZES.items():
        for policy in POLICIES:
            if (kind, policy) == ("tensors", "recompute"):
                continue  # one region, whatever its number of tensors
            counts = [float(n) for n in sizes if n <= most]
            if len(counts) < 2:
                continue
            say(f"{kind}, {policy}")
            rows.append(_row(kind, policy, "us each", counts, [added_us(kind, int(n), policy) for n in counts]))
    for policy in POLICIES:
        say(f"steps, {policy}")
        found = over_steps(policy, most)
        rows.append(_row("steps", policy, "ms", found["steps"], found["ms"]))
        rows.append(_row("steps", policy, BLOCKS, found["steps"], found["blocks"]))
    return rows


def _row(kind: str, policy: str, unit: str, counts: list[float], figures: list[float]) -> dict[str, Any]:
    exponent = None if unit == BLOCKS else slope(counts, figures)
    flat = figures[-1] < MAX_BLOCKS_LEFT if exponent is None else exponent <= FLAT_SLOPE
    return {
        "of": kind, "policy": policy, "unit": unit, "counts": counts, "figures": figures, "slope": exponent,
        "flat": flat,
    }  # fmt: skip


def render(rows: list[dict[str, Any]]) -> Table:
    """Return the figures as a table: least and largest number, slope and verdict."""
    table = Table(title="Growth: the figure at the least and at the largest number", title_justify="left")
    for column in ("of", "policy", "unit"):
        table.add_column(column)
    for column in ("from", "figure", "to", "figure", "slope", "verdict"):
        table.add_column(column, justify="right")
    for row in rows:
        ends = [_short(row[key][end]) for end in (0, -1) for key in ("counts", "figures")]
        table.add_row(
            row["of"],
            row["policy"],
            row["unit"],
            *ends,
            "" if row["slope"] is None else f"{row['slope']:+.2f}",
            "flat" if row["flat"] else "GROWS",
        )
    return table


def _short(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 1000 or figure == int(figure) else f"{figure:.3g}"


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Draw a panel for each kind of number; a flat line is a cost that does not grow."""
    panels = [("tensors", "us each"), ("modules", "us each"), ("steps", "ms"), ("steps", BLOCKS)]
    figure = Figure(figsize=(12, 3.2), dpi=100, layout="constrained")
    for axes, (kind, unit) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        mine = [row for row in rows if (row["of"], row["unit"]) == (kind, unit)]
        for row in mine:
            axes.plot(row["counts"], row["figures"], marker="o", markersize=4, label=row["policy"])
        most = max((figure for row in mine for figure in row["figures"]), default=1.0)
        axes.set(xscale="log", ylim=(0, 1.3 * max(most, 1.0)), xlabel=f"number of {kind}", title=unit)
        axes.grid(alpha=0.3)
        if mine:
            axes.legend(frameon=False, fontsize="small")
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=100_000, help="largest number of tensors, modules and steps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw them into this file: png, svg, pdf")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    with console.status("") as status:
        rows = measure(options.most, status.update)
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=2) + "\n")
    if options.plot is not None:
        draw(rows).savefig(options.plot)
    console.print(render(rows))
    return 0 if all(row["flat"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
