"""Names beside the marks of a picture, placed without overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

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
