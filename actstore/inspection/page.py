"""The page of an inspection, one HTML file without other resources, and its picture by matplotlib."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from actstore.base.units import format_nbytes
from actstore.display import pictures as look
from actstore.display.bars import scale
from actstore.display.colors import GREYS, SERIES
from actstore.inspection.beside import BesideActivations
from actstore.inspection.saved import InspectedTensor
from actstore.inspection.timeline import REST, Timeline, bands_of, decisions_of, holders, labels_of
from actstore.session.report import SiteReport

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TEXT_COLUMNS = (1, 2, 3, 4, 5, 6, 9)  # of a tensor's row: each text is in the file once


def page(
    tensors: Sequence[InspectedTensor],
    timelines: Sequence[Timeline],
    sites: Sequence[SiteReport],
    notes: Sequence[str],
    beside: BesideActivations,
) -> str:
    """Return the text of the file; the last timeline is the store's, with its sites; `notes` stand below them."""
    bands = bands_of(timelines)
    labels = labels_of(timelines, bands)
    found = decisions_of(bands, sites)
    rows: list[list[Any]] = [
        [
            tensor.saved_bytes, "x".join(map(str, tensor.shape)) or "scalar", tensor.dtype, tensor.operator,
            tensor.module, tensor.place, tensor.code, round(tensor.saved_ms, 2),
            None if tensor.freed_ms is None else round(tensor.freed_ms, 2), bands.get(tensor.module, REST),
        ]
        for tensor in tensors
    ]  # fmt: skip
    texts = {column: _Numbers() for column in _TEXT_COLUMNS}
    for row in rows:
        for column, numbers in texts.items():
            row[column] = numbers[row[column]]
    values = {
        "bands": labels,
        "notes": notes,
        "decisions": [found.get(label, "") for label in labels],
        "beside": list(beside.bands(timelines[0].points[0])),
        "timelines": [_timeline(line, bands, labels, beside) for line in timelines],
        "texts": {column: list(numbers) for column, numbers in texts.items()},
        "tensors": rows,
    }
    text = json.dumps(values, separators=(",", ":")).replace("</", "<\\/")  # it stands inside of a script element
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return (
        template.replace("__COLORS__", json.dumps(SERIES))
        .replace("__GREYS__", json.dumps(GREYS))
        .replace("__DATA__", text)
    )


class _Numbers(dict[Hashable, int]):
    """Numbers of values, in the order of their first use."""

    def __missing__(self, key: Hashable) -> int:
        self[key] = number = len(self)
        return number


def _timeline(line: Timeline, bands: dict[str, str], labels: list[str], beside: BesideActivations) -> dict[str, Any]:
    numbers = {label: at for at, label in enumerate(labels)}
    held = []
    for point in line.points:
        sums = [0] * len(labels)
        for name, nbytes in point.modules.items():
            sums[numbers[bands[name]]] += nbytes
        held.append(sums)
    return {
        "policy": line.policy,
        "backward_ms": round(line.backward_ms, 2),
        "ms": [round(point.ms, 2) for point in line.points],
        "allocated": [point.allocated_bytes for point in line.points],
        "counted": beside.are_counted(line),
        "beside": [list(beside.bands(point).values()) for point in line.points],
        "bytes": held,
    }


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
