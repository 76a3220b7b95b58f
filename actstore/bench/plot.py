"""A result as a picture: memory held against time."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from actstore.bench.result import Result, RowResult
from actstore.bench.table import MIB

_Point = tuple[float, ...]


@dataclass(frozen=True)
class _Look:
    label: str
    color: str
    marker: str


_LOOKS = {
    "plain": _Look("plain PyTorch", "#222222", "s"),
    "peer": _Look("other libraries", "#8a8a8a", "^"),
    "lossless": _Look("actstore, exact gradients", "#0b6bcb", "o"),
    "lossy": _Look("actstore, lossy", "#d9640d", "D"),
}
_REACHES = (0, 9, -9, 16, -16, 26, -26, 38, -38, 52, -52, 70, -70)
# Where a name may stand, in points from its mark, near places first and beside before above.
_PLACES = sorted(((dx, dy) for dx in _REACHES for dy in _REACHES if dx or dy), key=lambda p: hypot(p[0], 1.5 * p[1]))


def save(result: Result, path: Path) -> None:
    """Draw `result` into the file `path`; its ending (png, svg, pdf) is the format.

    Rows without time or memory are not in the picture.
    """
    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = [row for row in result.rows if row.ratio is not None and row.held_bytes is not None]
    for kind, look in _LOOKS.items():
        mine = [row for row in rows if _kind(row) == kind]
        if mine:
            axes.scatter(
                [row.ratio or 0.0 for row in mine],
                [_height(row) for row in mine],
                s=64,
                color=look.color,
                marker=look.marker,
                label=look.label,
                zorder=3,
                edgecolors="white",
                linewidths=0.8,
            )
    _dress(axes, result, rows)
    if rows:
        figure.legend(loc="outside lower center", ncols=len(_LOOKS), frameon=False, fontsize=9)
    figure.draw_without_rendering()
    _label(axes, rows)
    figure.savefig(path)


def _kind(row: RowResult) -> str:
    if row.kind == "ours":
        return "lossless" if row.bit_equal else "lossy"
    return row.kind


def _height(row: RowResult) -> float:
    return (row.held_bytes or 0) / MIB


def _dress(axes: Axes, result: Result, rows: list[RowResult]) -> None:
    work, env = result.workload, result.environment
    where = env["gpu"] if work["device"].startswith("cuda") else env["processor"]
    size = f"{work['layers']} layers, width {work['width']}, context {work['context']}, batch {work['batch']}"
    axes.set_title("What each store costs in time and saves in memory", loc="left", fontweight="bold", pad=22)
    axes.text(
        0, 1.02, f"GPT, {size}, {work['dtype']}; {where}", transform=axes.transAxes, fontsize=8.5, color="#555555"
    )
    axes.set_xlabel("step time, plain PyTorch = 1 (further left is faster)")
    axes.set_ylabel("activations held at the end of forward, MiB (lower is smaller)")
    ratios = [row.ratio or 0.0 for row in rows] or [1.0]
    heights = [_height(row) for row in rows] or [1.0]
    spread = max(ratios) - min(ratios) or 0.2
    axes.set_xlim(min(ratios) - 0.12 * spread, max(ratios) + 0.2 * spread)
    axes.set_ylim(-0.09 * max(heights), 1.1 * max(heights))
    axes.axvline(1, color="#cccccc", linewidth=1, zorder=1)
    axes.grid(True, color="#eeeeee", zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _label(axes: Axes, rows: list[RowResult]) -> None:
    """Name each mark at the nearest place where neither the name nor the line to it touches a mark or another name."""
    points: list[_Point] = [tuple(axes.transData.transform((row.ratio or 0.0, _height(row)))) for row in rows]
    reach = 5 * axes.figure.dpi / 72  # from the middle of a mark to its edge
    marks = [Bbox.from_extents(x - reach, y - reach, x + reach, y + reach) for x, y in points]
    names: list[Bbox] = []
    inside = axes.get_window_extent()
    for index in sorted(range(len(rows)), key=points.__getitem__):
        others = marks[:index] + marks[index + 1 :] + names
        # Where marks lie upon each other no line is free: then it is enough that the names are.
        for place, free_line in [*((place, True) for place in _PLACES), *((place, False) for place in _PLACES)]:
            name = _annotate(axes, rows[index], place)
            box = _extent(name)
            within = inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)
            touches = any(box.overlaps(other) for other in [*marks, *names])
            if within and not touches and not (free_line and _crosses(points[index], box, others)):
                break
            name.remove()
        else:
            box = _extent(_annotate(axes, rows[index], _PLACES[0]))
        names.append(box)


def _crosses(mark: _Point, box: Bbox, others: list[Bbox]) -> bool:
    """Whether the line from a mark to the nearest point of its name runs through another name or mark."""
    x, y = mark
    end_x, end_y = min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)
    steps = [i / 16 for i in range(17)]
    return any(other.contains(x + s * (end_x - x), y + s * (end_y - y)) for s in steps for other in others)


def _extent(name: Annotation) -> Bbox:
    """Of the letters alone: the annotation's own extent takes in the line to its mark."""
    name.get_window_extent()  # puts the letters in their place
    return Text.get_window_extent(name).padded(2)


def _annotate(axes: Axes, row: RowResult, place: tuple[int, int]) -> Annotation:
    dx, dy = place
    far = max(abs(dx), abs(dy)) > 16
    look = _LOOKS[_kind(row)]
    return axes.annotate(
        row.name,
        (row.ratio or 0.0, _height(row)),
        xytext=place,
        textcoords="offset points",
        ha="left" if dx > 0 else "right" if dx < 0 else "center",
        va="bottom" if dy > 0 else "top" if dy < 0 else "center",
        fontsize=9,
        color=look.color,
        arrowprops={"arrowstyle": "-", "color": look.color, "linewidth": 0.6} if far else None,
    )
