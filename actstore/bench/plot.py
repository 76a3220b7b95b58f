"""Picture of a result: memory held against time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from actstore.bench.labels import Label, place
from actstore.bench.result import Result, RowResult
from actstore.bench.table import MIB
from actstore.display import pictures as look

Memory = Literal["held", "peak"]
_AXES = {"held": "activations held at the end of forward", "peak": "high-water of the process (of the GPU)"}
_MIN_DRAWN_MIB = 2.0**-10  # MiB drawn for a row that holds nothing: the axis is logarithmic


def save(result: Result, path: Path, memory: Memory = "held") -> None:
    """Draw `result` into the file `path`; its suffix (png, svg, pdf) is the format."""
    draw(result, memory).savefig(path)


def draw(result: Result, memory: Memory = "held") -> Figure:
    """Draw the figure of a result.

    memory : "held", activations at the end of forward, or "peak", the high-water of `peak_bytes`

    Rows without time or memory are left out. One line joins the Pareto front of actstore's exact rows, another one
    that of plain and the peers.
    """
    point = partial(_point, memory=memory)
    rows = [row for row in result.rows if row.ratio is not None and _nbytes(row, memory) is not None]
    figure = look.figure(5.6 if len(rows) <= 16 else 7.2)
    axes = figure.add_subplot()
    for kind, drawn in look.KINDS.items():
        mine = [row for row in rows if row.look == kind]
        if mine:
            x, y = zip(*map(point, mine), strict=True)
            axes.scatter(
                x, y, s=64, color=drawn.color, marker=drawn.marker, label=drawn.label, zorder=3, edgecolors="white",
                linewidths=0.8,
            )  # fmt: skip
    _dress(axes, result, [point(row) for row in rows], memory)
    for ours, color in ((True, look.BLUE), (False, look.GREY)):
        exact = [row for row in rows if row.bit_equal and (row.kind == "ours") == ours]
        _draw_front(axes, [point(row) for row in exact], color)
    if rows:
        figure.legend(loc="outside lower center", ncols=len(look.KINDS), frameon=False, fontsize=look.NORMAL)
    figure.draw_without_rendering()
    place(axes, labels(rows, memory), look.NORMAL if len(rows) <= 16 else look.SMALL)
    return figure


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front: the points that no other beats in both coordinates, from left to right."""
    found: list[tuple[float, float]] = []
    for point in sorted(points):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found


def labels(rows: list[RowResult], memory: Memory = "held") -> list[Label]:
    """Return the names of the rows, at their marks."""
    return [Label(row.name, *_point(row, memory), look.KINDS[row.look].color) for row in rows]


def _nbytes(row: RowResult, memory: Memory) -> int | None:
    return row.held_bytes if memory == "held" else row.peak_bytes


def _point(row: RowResult, memory: Memory) -> tuple[float, float]:
    return row.ratio or 0.0, max((_nbytes(row, memory) or 0) / MIB, _MIN_DRAWN_MIB)


def _draw_front(axes: Axes, exact: list[tuple[float, float]], color: str) -> None:
    """Draw a front as steps, from the top of the axes above its first point to their right edge after its last one."""
    points = front(exact)
    if points:
        x, y = zip(*points, strict=True)
        high, right = axes.get_ylim()[1], axes.get_xlim()[1]
        axes.step([x[0], *x, right], [high, *y, y[-1]], where="post", color=color, alpha=0.35, linewidth=1.3, zorder=2)


def _dress(axes: Axes, result: Result, points: list[tuple[float, float]], memory: Memory) -> None:
    look.heading(
        axes,
        "What each store costs in time and saves in memory",
        f"{result.subject}; {result.place}; lines: best exact rows",
    )
    axes.set_xlabel("step time, plain PyTorch = 1 (further left is faster)")
    axes.set_ylabel(f"{_AXES[memory]}, MiB (lower is smaller)")
    x, y = zip(*(points or [(1.0, 1.0)]), strict=True)
    spread = max(x) - min(x) or 0.2
    axes.set_xlim(min(x) - 0.12 * spread, max(x) + 0.2 * spread)
    axes.set_yscale("log")
    reach = max(y) / min(y)
    axes.set_ylim(min(y) / max(1.3, reach**0.12), max(y) * max(1.3, reach**0.12))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.axvline(1, color=look.RULE, linewidth=1, zorder=1)
    look.clean(axes)
