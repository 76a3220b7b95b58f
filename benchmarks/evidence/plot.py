"""Picture of `benchmarks.evidence.run`: for each task loss curves, and final losses less plain's."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log10
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from actstore.display import pictures as look
from benchmarks.evidence.tasks import PLAIN, TASKS

CURVES = {  # rows whose losses are drawn
    "int8": look.BLUE,
    "int4, dither": look.GREEN,
    "int2, dither": look.ORANGE,
    "recompute(int4)": look.VERMILION,
    "topk, a quarter": look.PURPLE,
}
HEADING_INCHES, LINE_INCHES = 0.75, 0.15  # inches, of a task, and of each of its rows

Offs = Mapping[tuple[str, str], tuple[tuple[float, float], float]]


def draw(found: dict[str, Any], offs: Offs) -> Figure:
    """Draw all tasks that have cells.

    Parameters
    ----------
    offs : by task and row: mean and half interval of its difference to plain, and the half interval of plain itself
    """
    tasks = [task for task in found["tasks"] if (task, PLAIN) in offs]
    figure = look.figure((HEADING_INCHES + LINE_INCHES * len(found["rows"])) * max(1, len(tasks)) + 0.4)
    if not tasks:
        return figure
    for task, (left, right) in zip(tasks, figure.subplots(len(tasks), 2, squeeze=False), strict=True):
        _curves(left, found, task)
        _differences(right, [row for row in found["rows"] if row != PLAIN and (task, row) in offs], task, offs)
    figure.axes[-2].set_xlabel("step")
    figure.axes[-1].set_xlabel("final loss less plain's\n(a scale that is logarithmic but near 0)")
    named = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes[::2]]
    handles = {label: handle for pairs in named for handle, label in pairs}  # a task may lack rows
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=7, frameon=False, fontsize=look.NORMAL)
    return figure


def _curves(axes: Axes, found: dict[str, Any], task: str) -> None:
    """Draw means over seeds; for plain also the range from the lowest to the highest seed."""
    for row, color in {**CURVES, PLAIN: look.BLACK}.items():
        curves = [
            cell["curve"] for cell in found["cells"] if (cell["task"], cell["row"]) == (task, row) and cell.get("curve")
        ]
        if not curves:
            continue
        points = list(zip(*curves, strict=True))
        width = found["tasks"][task]["steps"] / len(points)
        x = [(number + 0.5) * width for number in range(len(points))]
        if row == PLAIN:
            low, high = map(min, points), map(max, points)
            axes.fill_between(x, [*low], [*high], color=look.RULE, linewidth=0, label="plain's seeds")
        dashes: Any = (0, (4, 2)) if row == PLAIN else "-"
        axes.plot(x, [fmean(point) for point in points], color=color, linewidth=1.2, linestyle=dashes, label=row)
    if TASKS[task].classes:
        axes.set_yscale("log")
    look.heading(axes, task, TASKS[task].title, letters=62)
    look.clean(axes)
    axes.set_ylabel("training loss")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _differences(axes: Axes, rows: list[str], task: str, offs: Offs) -> None:
    """Draw a mark for each row, and its interval; a diverged row has a word instead."""
    band = offs[task, PLAIN][1]
    axes.axvspan(-band, band, color=look.GRID)
    axes.axvline(0, color=look.BLACK, linewidth=1.1, linestyle=(0, (4, 2)))
    for place, row in enumerate(rows):
        (mean, half), _ = offs[task, row]
        color = CURVES.get(row, look.GREY)
        if mean == float("inf"):
            axes.text(0, place, "diverged", color=look.VERMILION, fontsize=look.SMALL, va="center")
        else:
            axes.errorbar(mean, place, xerr=half, color=color, marker="o", markersize=4, linewidth=1.3, capsize=2)
    axes.set_xscale("symlog", linthresh=band / 10)
    decades = [10.0**power for power in range(ceil(log10(band / 5)), 2)]  # decades nearer to 0 have no room for labels
    axes.set_xticks([*(-size for size in decades), 0, *decades], minor=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.autoscale_view()
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    look.clean(axes, "x")
