"""Picture of a result: memory held against time; and names beside the marks of any picture, without overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import hypot
from pathlib import Path
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from actstore.bench.result import Result, RowResult
from actstore.bench.table import MIB
from actstore.display import pictures as look

_Point = tuple[float, ...]
_OFFSETS = (0, 9, -9, 16, -16, 26, -26, 38, -38, 52, -52, 70, -70)
# Offsets of a name from its mark, in points; near ones first, and beside before above.
_PLACES = sorted(((dx, dy) for dx in _OFFSETS for dy in _OFFSETS if dx or dy), key=lambda p: hypot(p[0], 1.5 * p[1]))


class Label(NamedTuple):
    """A name for the mark at `x`, `y`."""

    name: str
    x: float
    y: float
    color: str


def place(axes: Axes, labels: Sequence[Label], fontsize: float = 9) -> None:
    """Name each mark at the nearest place where neither the name nor the line to it touches a mark or another name.

    The limits of the axes must be final, and the figure drawn once.
    """
    points: list[_Point] = [tuple(axes.transData.transform((label.x, label.y))) for label in labels]
    reach = 5 * axes.figure.dpi / 72  # from the middle of a mark to its edge
    marks = [Bbox.from_extents(x - reach, y - reach, x + reach, y + reach) for x, y in points]
    names: list[Bbox] = []
    inside = axes.get_window_extent()
    for index in sorted(range(len(labels)), key=points.__getitem__):
        others = marks[:index] + marks[index + 1 :] + names
        # Where marks overlap no line is free: then only the names must not overlap.
        for offset, free_line in [*((place, True) for place in _PLACES), *((place, False) for place in _PLACES)]:
            name = _annotate(axes, labels[index], offset, fontsize)
            box = extent(name)
            within = inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)
            touches = any(box.overlaps(other) for other in [*marks, *names])
            if within and not touches and not (free_line and _crosses(points[index], box, others)):
                break
            name.remove()
        else:
            box = extent(_annotate(axes, labels[index], _PLACES[0], fontsize))
        names.append(box)


def columns(axes: Axes, labels: Sequence[Label], middle: float, fontsize: float = 9) -> None:
    """Name marks in two columns, each with a line to it: in the left one where `x` is below `middle`.

    The limits of the axes must be final, and the figure drawn once.
    """
    inside = axes.get_window_extent()
    gap = 1.5 * fontsize * axes.figure.dpi / 72
    for at, align, side in (
        (0.25, "right", [label for label in labels if label.x < middle]),
        (0.76, "left", [label for label in labels if label.x >= middle]),
    ):
        ordered = sorted(side, key=lambda label: label.y)
        heights = [float(axes.transData.transform((label.x, label.y))[1]) for label in ordered]
        for label, height in zip(ordered, spread(heights, gap, inside.y0 + gap, inside.y1 - gap), strict=True):
            axes.annotate(
                label.name,
                (label.x, label.y),
                xytext=(at, (height - inside.y0) / inside.height),
                textcoords="axes fraction",
                ha=align,
                va="center",
                fontsize=fontsize,
                color=label.color,
                arrowprops={"arrowstyle": "-", "color": label.color, "linewidth": 0.5, "alpha": 0.7, "shrinkB": 4},
            )


def spread(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move ascending heights apart to at least `gap`, as little as possible, between `low` and `high`.

    Where they do not all fit, they extend below `low`.
    """
    blocks: list[tuple[float, int]] = []  # heights that touch: the sum of their unshifted starts, and their count
    for index, height in enumerate(heights):
        total, count = height - index * gap, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            before, more = blocks.pop()
            total, count = total + before, count + more
        blocks.append((total, count))
    starts = [total / count for total, count in blocks for _ in range(count)]
    room = high - low - (len(heights) - 1) * gap
    return [low + min(max(start - low, 0.0), room) + index * gap for index, start in enumerate(starts)]


def _crosses(mark: _Point, box: Bbox, others: list[Bbox]) -> bool:
    """Return whether the line from a mark to the nearest point of its name crosses another name or mark."""
    x, y = mark
    end_x, end_y = min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)
    steps = [i / 16 for i in range(17)]
    return any(other.contains(x + s * (end_x - x), y + s * (end_y - y)) for s in steps for other in others)


def extent(name: Annotation) -> Bbox:
    """Return the box of the letters alone: the annotation's own extent includes the line to its mark."""
    name.get_window_extent()  # lays the letters out
    return Text.get_window_extent(name).padded(2)


def _annotate(axes: Axes, label: Label, offset: tuple[int, int], fontsize: float) -> Annotation:
    dx, dy = offset
    far = max(abs(dx), abs(dy)) > 16
    return axes.annotate(
        label.name,
        (label.x, label.y),
        xytext=offset,
        textcoords="offset points",
        ha="left" if dx > 0 else "right" if dx < 0 else "center",
        va="bottom" if dy > 0 else "top" if dy < 0 else "center",
        fontsize=fontsize,
        color=label.color,
        zorder=5,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
        arrowprops={"arrowstyle": "-", "color": label.color, "linewidth": 0.6} if far else None,
    )


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
