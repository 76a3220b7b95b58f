"""Loss curves of training through a store, beside plain training."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf, isfinite, nan
from statistics import fmean
from typing import TYPE_CHECKING, Any

from actstore.bench import runner
from actstore.bench.peers.rows import Row
from actstore.bench.result import Result, RowResult
from actstore.bench.workloads.workload import Workload
from actstore.display.colors import SERIES
from benchmarks.markdown import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = ("plain", "bitsandbytes 8-bit", "raw @ host", "raw @ disk", "expack", "recompute", "int8", "int4")
FINAL_STEPS = 20  # steps at the end, whose mean is the final loss
POINTS = 24  # of a curve, each the mean of neighboring steps


def measure(works: list[Workload], chosen: list[Row], done: Callable[[dict[str, Any]], None]) -> None:
    """Measure all workloads; `done` receives the results so far after each row."""
    found: dict[str, Any] = {"runs": []}

    def keep(result: Result) -> None:
        found["runs"][-1] = result.to_dict()
        found["environment"] = result.environment
        done(found)

    for work in works:
        found["runs"].append({})
        keep(runner.run(work, chosen, row_done=keep))


def results(found: dict[str, Any]) -> list[Result]:
    return [Result.from_dict(run) for run in found["runs"] if run]


def final(row: RowResult) -> float:
    """Return the mean loss of the last steps."""
    return fmean(_numbers(row)[-FINAL_STEPS:])


def astray(row: RowResult, plain: RowResult) -> float:
    """Return the largest distance of a step's loss from plain's; infinite where a loss is not finite."""
    off = [abs(a - b) for a, b in zip(_numbers(row), _numbers(plain), strict=False)]
    return max(off) if all(map(isfinite, off)) else inf


def _numbers(row: RowResult) -> list[float]:
    return [nan if loss is None else loss for loss in row.losses]  # JSON has None for a loss that is not finite


def draw(found: dict[str, Any]) -> Figure:
    """Draw the losses of each workload, and below them their distance from plain's."""
    from matplotlib.ticker import FuncFormatter  # the figures are read without it, too

    from actstore.display import pictures as look

    shown = [result for result in results(found) if result.rows and result.rows[0].losses]
    figure = look.figure(6.6)
    if not shown:
        return figure
    grid = figure.subplots(2, len(shown), sharex="col", squeeze=False, height_ratios=(1.5, 1))
    styles: dict[str, dict[str, Any]] = {}
    for (above, below), result in zip(grid.T, shown, strict=True):
        plain, *others = (row for row in result.rows if row.losses)
        exact = [row for row in others if astray(row, plain) == 0]
        off = [row for row in others if row not in exact]
        for row in off:
            color = SERIES[len(styles) % len(SERIES)]
            style = styles.setdefault(row.name, {"color": color, "linewidth": 1.3, "label": row.name})
            above.plot(*smooth(_numbers(row)), **style)
            below.plot(*smooth([a - b for a, b in zip(_numbers(row), _numbers(plain), strict=False)]), **style)
        same = f"plain{''.join(f', {row.name}' for row in exact)}"
        above.plot(*smooth(_numbers(plain)), color=look.BLACK, linewidth=1.1, linestyle=(0, (4, 2)))
        below.axhline(0, color=look.BLACK, linewidth=1.1, linestyle=(0, (4, 2)))
        look.heading(above, result.workload["model"], f"dashed, equal in every bit: {same}", letters=110 // len(shown))
        below.set_xlabel("step")
        for axes in (above, below):
            look.clean(axes)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    grid[0, 0].set_ylabel("loss (lower is better)")
    grid[1, 0].set_ylabel("loss less plain's")
    if styles:
        handles = {
            label: line for axes in grid[0] for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=look.NORMAL
        )
    return figure


def smooth(losses: list[float]) -> tuple[list[float], list[float]]:
    """Return means of neighboring steps, at their middles."""
    count = min(POINTS, len(losses))
    edges = list(pairwise(len(losses) * point // count for point in range(count + 1)))
    return [(a + b) / 2 for a, b in edges], [fmean(losses[a:b]) for a, b in edges]


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures in Markdown."""
    said = []
    for result in results(found):
        plain = result.rows[0]
        cells = [
            [row.name, f"{final(row):.4f}", f"{final(row) - final(plain):+.4f}", f"{astray(row, plain):.2g}"]
            for row in result.rows
            if row.losses and plain.losses
        ]
        header = [result.subject, f"loss of the last {FINAL_STEPS}", "less plain's", "farthest step"]
        said += [*table(header, cells), *(f"- {row.name} failed: {row.failed}" for row in result.failed), ""]
    return said
