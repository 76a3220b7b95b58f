"""The picture of an inspection, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from actstore.base.units import format_nbytes
from actstore.display import pictures as look
from actstore.display.bars import scale
from actstore.display.colors import GREYS, SERIES
from actstore.inspection.beside import BesideActivations
from actstore.inspection.timeline import Timeline, bands_of, decisions_of, holders, labels_of
from actstore.session.report import SiteReport

PANEL_HEIGHT = 3.2  # inches


def picture(plain: Timeline, store: Timeline, sites: Sequence[SiteReport], beside: BesideActivations) -> Figure:
    """Draw both timelines, one below the other, with the same scales of bytes and the same colors of layers.

    Weights, optimizer and gradients are gray bands below the layers, and a line has all tensors of the process, where
    the device counts these. The legend of the lower one has the decisions on each band, from the sites of the store's
    report.
    """
    figure = look.figure(2 * PANEL_HEIGHT)
    upper, lower = figure.subplots(2, sharey=True)
    bands = bands_of([plain, store])
    labels = labels_of([plain, store], bands)
    colors = {label: SERIES[at % len(SERIES)] for at, label in enumerate(labels)}
    nbytes, unit = scale(max(beside.total_bytes(point) for line in (plain, store) for point in line.points))
    decisions = decisions_of(bands, sites)
    for axes, line, names in ((upper, plain, {}), (lower, store, decisions)):
        drawn = _draw(axes, line, bands, colors, nbytes, beside)
        axes.set_ylabel(unit)
        layers = [f"{label}: {names[label]}" if label in names else label for label in labels]
        greys = [
            f"{name} {format_nbytes(max(beside.bands(point)[name] for point in line.points))}"
            for name in beside.bands(line.peak)
        ]
        look.legend(axes, [*layers, *greys, "all tensors"][: len(drawn)], drawn)
    lower.set_xlabel("ms of the step")
    return figure


def _draw(
    axes: Axes, line: Timeline, bands: dict[str, str], colors: dict[str, str], nbytes: int, beside: BesideActivations
) -> list[Artist]:
    """Draw the bands of one timeline, its peak, and where backward begins. Returns the marks of its legend."""
    times = [point.ms for point in line.points]
    heights: dict[str, list[float]] = {label: [0.0] * len(times) for label in colors}
    for at, point in enumerate(line.points):
        for name, held in point.modules.items():
            heights[bands[name]][at] += held / nbytes
    below = [[part / nbytes for part in beside.bands(point).values()] for point in line.points]
    stack = [*zip(*below, strict=True), *heights.values()]
    drawn: list[Artist] = [*axes.stackplot(times, *stack, colors=[*GREYS, *colors.values()], step="post")]
    drawn = drawn[len(GREYS) :] + drawn[: len(GREYS)]
    if beside.are_counted(line):
        allocated = [(point.allocated_bytes or 0) / nbytes for point in line.points]
        drawn += axes.step(times, allocated, where="post", color=look.BLACK, linewidth=0.8)
    peak = line.peak
    largest = ", ".join(f"{name} {format_nbytes(held)}" for name, held in holders(line))
    title = f"{line.policy}: at most {format_nbytes(peak.held_bytes)} of activations"
    look.heading(axes, title, f"at the peak: {largest}")
    axes.plot([peak.ms], [beside.total_bytes(peak) / nbytes], "v", color=look.BLACK, markersize=5)
    axes.axvline(line.backward_ms, color=look.GREY, linewidth=0.8, linestyle="--")
    axes.annotate(
        "backward", (line.backward_ms, 1), (4, -10), xycoords=("data", "axes fraction"), textcoords="offset points",
        fontsize=look.SMALL, color=look.NOTE,
    )  # fmt: skip
    axes.set_xlim(times[0], times[-1])
    look.clean(axes, "y")
    return drawn
