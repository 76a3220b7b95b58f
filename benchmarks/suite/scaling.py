"""Growth of memory and time of some rows with layers, context and batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from actstore.bench import runner
from actstore.bench.peers.rows import Row
from actstore.bench.result import RowResult, subject
from actstore.bench.table import MIB
from actstore.bench.workloads.workload import Workload
from actstore.display import pictures as look
from actstore.display.colors import SERIES
from benchmarks.markdown import table

ROWS = ("plain", "torch checkpoint", "recompute", "int8", "raw @ disk")  # plain and one peer, then ours
_FIGURES = ("name", "kind", "step_ms", "ratio", "held_bytes", "failed")


def measure(
    work: Workload, sizes: dict[str, list[int]], chosen: list[Row], done: Callable[[dict[str, Any]], None]
) -> None:
    """Measure `work` with each of the `sizes`, by axis; `done` receives the figures so far after each size."""
    found: dict[str, Any] = {"workload": work.to_dict(), "sizes": sizes, "points": []}
    for axis, values in sizes.items():
        for value in values:
            result = runner.run(replace(work, **{axis: value}), chosen)
            found["environment"] = result.environment
            figures = [{name: getattr(row, name) for name in _FIGURES} for row in result.rows]
            found["points"].append({"axis": axis, "size": value, "rows": figures})
            done(found)


def draw(found: dict[str, Any]) -> Figure:
    """Draw held bytes above, times below, a column for each axis; both logarithmic."""
    figure = look.figure(6.4)
    axes_names = list(found["sizes"])
    grid = figure.subplots(2, len(axes_names), sharey="row", squeeze=False)
    for column, axis in enumerate(axes_names):
        points = [point for point in found["points"] if point["axis"] == axis]
        for number, name in enumerate(ROWS):
            rows_ = [(p["size"], row) for p in points for row in p["rows"] if row["name"] == name]
            for place, (figure_, scale) in zip(grid[:, column], (("held_bytes", MIB), ("step_ms", 1)), strict=True):
                line = [(size, row[figure_] / scale) for size, row in rows_ if row[figure_]]
                if line:
                    _line(place, line, name, number)
        _dress(grid[0, column], grid[1, column], axis, found["sizes"][axis], first=column == 0)
    look.heading(grid[0, 0], "How memory and time grow", letters=200)
    grid[0, -1].set_title(subject(found["workload"]), loc="right", fontsize=look.SMALL, color=look.NOTE)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(ROWS), frameon=False, fontsize=look.NORMAL)
    return figure


def _line(axes: Axes, line: list[tuple[int, float]], name: str, number: int) -> None:
    color = (look.BLACK, look.GREY, *SERIES)[number]
    marker = look.MARKERS[number % len(look.MARKERS)]
    axes.plot(*zip(*line, strict=True), color=color, marker=marker, markersize=5, linewidth=1.4, label=name)


def _dress(above: Axes, below: Axes, axis: str, sizes: list[int], *, first: bool) -> None:
    for axes in (above, below):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(labelsize=look.SMALL)
        look.clean(axes)
    below.set_xlabel(axis)
    if first:
        above.set_ylabel("held, MiB (lower is smaller)")
        below.set_ylabel("step, ms (lower is faster)")


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures in Markdown: held MiB and times plain."""
    cells = [
        [f"{point['axis']} {point['size']}", *(_cell(RowResult(**_by_name(point, name))) for name in ROWS)]
        for point in found["points"]
    ]
    return ["MiB held, and times plain:", "", *table(["size", *ROWS], cells)]


def _by_name(point: dict[str, Any], name: str) -> dict[str, Any]:
    return next((row for row in point["rows"] if row["name"] == name), {"name": name, "kind": "", "failed": "no row"})


def _cell(row: RowResult) -> str:
    if row.held_bytes is None or row.ratio is None:
        return "-"
    return f"{row.held_bytes / MIB:.1f}, {row.ratio:.2f}"
