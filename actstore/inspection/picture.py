"""Pictures of memory through a step: bands of layers, plain beside the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from actstore.base.units import format_nbytes
from actstore.display import pictures as look
from actstore.display.bars import scale
from actstore.display.colors import SERIES
from actstore.inspection.timeline import Timeline, bands_of, decisions_of, holders, labels_of
from actstore.session.rows import SiteReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_HEIGHT = 3.2  # inches


def picture(plain: Timeline, store: Timeline, sites: Sequence[SiteReport]) -> Figure:
    """Draw both timelines, one below the other, with the same scales of bytes and the same colours of layers.

    The legend of the lower one has the decisions on each band, from the sites of the store's report.
    """
    figure = look.figure(2 * PANEL_HEIGHT)
    upper, lower = figure.subplots(2, sharey=True)
    bands = bands_of([plain, store])
    labels = labels_of([plain, store], bands)
    colors = {label: SERIES[at % len(SERIES)] for at, label in enumerate(labels)}
    nbytes, unit = scale(max(plain.peak.held_bytes, store.peak.held_bytes))
    decisions = decisions_of(bands, sites)
    for axes, line, names in ((upper, plain, {}), (lower, store, decisions)):
        _draw(axes, line, bands, colors, nbytes)
        axes.set_ylabel(f"activations, {unit}")
        look.legend(axes, [f"{label}: {names[label]}" if label in names else label for label in labels])
    lower.set_xlabel("ms of the step")
    return figure


def _draw(axes: Axes, line: Timeline, bands: dict[str, str], colors: dict[str, str], nbytes: int) -> None:
    """Draw the bands of one timeline, its peak, and where backward begins."""
    times = [point.ms for point in line.points]
    heights: dict[str, list[float]] = {label: [0.0] * len(times) for label in colors}
    for at, point in enumerate(line.points):
        for name, held in point.modules.items():
            heights[bands[name]][at] += held / nbytes
    axes.stackplot(times, *heights.values(), labels=list(heights), colors=list(colors.values()), step="post")
    peak = line.peak
    largest = ", ".join(f"{name} {format_nbytes(held)}" for name, held in holders(line))
    look.heading(axes, f"{line.policy}: at most {format_nbytes(peak.held_bytes)}", f"at the peak: {largest}")
    axes.plot([peak.ms], [peak.held_bytes / nbytes], "v", color=look.BLACK, markersize=5)
    axes.axvline(line.backward_ms, color=look.GREY, linewidth=0.8, linestyle="--")
    axes.annotate(
        "backward", (line.backward_ms, 1), (4, -10), xycoords=("data", "axes fraction"), textcoords="offset points",
        fontsize=look.SMALL, color=look.NOTE,
    )  # fmt: skip
    axes.set_xlim(times[0], times[-1])
    look.clean(axes, "y")
