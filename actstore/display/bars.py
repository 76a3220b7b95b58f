"""Bar charts of the bytes that each part of a model holds, moves and frees."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from actstore.display import pictures as look
from actstore.display.colors import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_AXIS_NAMES = 48
MAX_COLORED_DECISIONS = 9
KEEP, KEPT, OTHERS = "keep", "#9aa5b1", "#444444"
SCALES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


class Bar(NamedTuple):
    """One part of a model. Of the `saved` bytes that plain training keeps, `held` stay and `moved` leave."""

    name: str
    decision: str
    saved: float
    held: float
    moved: float

    @property
    def freed(self) -> float:
        return max(0.0, self.saved - self.held - self.moved)


def picture(bars: Sequence[Bar], title: str) -> Figure:
    """Return a figure with a bar chart alone, of at least one bar."""
    figure = look.figure(height(len(bars)))
    draw(figure.subplots(), bars, title)
    return figure


def height(count: int) -> float:
    """Return the height in inches of a chart with `count` bars."""
    return 1.6 + 0.16 * max(8, min(count, MAX_AXIS_NAMES))


def scale(largest: float) -> tuple[int, str]:
    """Return the unit for sizes up to `largest` bytes, and its size in bytes."""
    return next((scale, unit) for scale, unit in SCALES if max(largest, 1) >= scale)


def draw(axes: Axes, bars: Sequence[Bar], title: str) -> None:
    """Draw a bar for each part: held solid, moved hatched, freed pale."""
    largest = max(bar.saved for bar in bars)
    nbytes, unit = scale(largest)
    decisions = list(dict.fromkeys(bar.decision for bar in bars if bar.decision != KEEP))
    colors = dict.fromkeys(decisions, OTHERS) | dict(zip(decisions[:MAX_COLORED_DECISIONS], SERIES, strict=False))
    colors[KEEP] = KEPT
    at = range(len(bars))
    color = [colors[bar.decision] for bar in bars]
    held, moved, freed = ([getattr(bar, name) / nbytes for bar in bars] for name in ("held", "moved", "freed"))
    axes.barh(at, held, color=color, height=0.8)
    axes.barh(at, moved, left=held, color="white", edgecolor=color, hatch="////", height=0.8, linewidth=0.6)
    start = [a + b for a, b in zip(held, moved, strict=True)]
    axes.barh(at, freed, left=start, color=color, alpha=0.22, height=0.8)
    every = -(-len(bars) // MAX_AXIS_NAMES)  # the axis names every n-th bar
    ticks = list(at)[::every]
    axes.set_yticks(ticks, [bars[i].name for i in ticks], fontsize=look.SMALL)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.04 * largest / nbytes or 1.0)
    look.heading(axes, title)
    look.clean(axes, "x")
    axes.set_xlabel(f"activations, {unit}: held solid, moved hatched, freed pale")
    for decision in dict.fromkeys(bar.decision for bar in bars):
        if colors[decision] != OTHERS:
            axes.barh([0], [0], color=colors[decision], label=fill(decision, 34))
    if OTHERS in colors.values():
        axes.barh([0], [0], color=OTHERS, label="other decisions")
    look.legend(axes)
