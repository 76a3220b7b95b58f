"""A picture of a trace: compute, the links and the stalls over time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from actstore.base.units import format_nbytes
from actstore.display import pictures as look
from actstore.trace import Event, Trace
from actstore.trace.summary import Lane, Spans, Summary, format_ms, format_percent, union

AXIS_PIXELS = 2000  # of the time axis; events that lie closer together are one bar
MAX_BARS = 300  # of one kind in one lane; more events are drawn as the part of each bin that they fill
BINS = 400
_COLORS = {**look.TIMES, "offload": look.GREEN, "fetch": look.ORANGE}
_NESTED = ("recompute", "encode", "decode")  # drawn inside of forward and backward
_TALL, _LOW = 0.72, 0.40  # heights of bars


def save(trace: Trace, path: Path, step: int | None = None) -> None:
    """Draw one step of `trace`, the last whole one by default, into the file `path`.

    The ending of `path` (png, svg, pdf) is the format. A trace without events gives an empty picture.
    """
    if step is None:
        step = trace.last_step()
    events = [event for event in trace.events(step) if event.kind != "keep"]
    figure = draw(events, Summary.of(events), _subtitle(trace, step))
    figure.savefig(path)


def draw(events: list[Event], summary: Summary, subtitle: str) -> Figure:
    """Draw the events, with lanes from top to bottom and milliseconds from left to right."""
    lanes = summary.lanes
    figure = look.figure(1.75 + 0.72 * max(2, len(lanes)))
    axes = figure.add_subplot()
    zero = min((event.begin_ns for event in events), default=0)
    end = max((event.end_ns for event in events), default=0)
    gap = (end - zero) // AXIS_PIXELS
    binned = False
    for row, lane in enumerate(lanes):
        mine = [event for event in events if event.lane == lane.name]
        for kind in _COLORS:
            spans = union((event.begin_ns, event.end_ns) for event in mine if event.kind == kind)
            if len(spans) > MAX_BARS and kind != "stall":
                binned = True
                _fill(axes, spans, (zero, end), row, kind)
            else:
                _bars(axes, union(spans, gap), zero, row, kind, least_ns=gap)
    _name_halves(axes, events, zero)
    _mark_stalls(axes, events, zero, gap)
    if binned:
        subtitle += f"; heights: the part of {format_ms((end - zero) / BINS)} that is filled"
    _dress(axes, lanes, summary, subtitle, end - zero)
    kinds = [kind for kind in _COLORS if any(event.kind == kind for event in events)]
    if kinds:
        patches = [Patch(color=_COLORS[kind], label=kind) for kind in kinds]
        figure.legend(
            handles=patches, loc="outside lower center", ncols=len(kinds), frameon=False, fontsize=look.NORMAL
        )
    return figure


def _bars(axes: Axes, spans: Spans, zero: int, row: int, kind: str, least_ns: int) -> None:
    """Draw the bars of one kind, each at least a pixel wide."""
    height = _LOW if kind in _NESTED else _TALL
    bars = [((begin - zero) / 1e6, max(end - begin, least_ns) / 1e6) for begin, end in spans]
    axes.broken_barh(
        bars, (row - height / 2, height), color=_COLORS[kind], linewidth=0, zorder=4 if kind == "stall" else 3
    )


def _fill(axes: Axes, spans: Spans, window: tuple[int, int], row: int, kind: str) -> None:
    """Draw many spans as one shape, whose height in each bin is the part of the time that they fill."""
    edges = np.linspace(*window, BINS + 1)
    moments = np.array(spans, dtype=np.float64).ravel()
    busy = np.concatenate([[0.0], np.cumsum(np.diff(moments) * (np.arange(moments.size - 1) % 2 == 0))])
    part = np.diff(np.interp(edges, moments, busy)) / np.diff(edges)
    height = _LOW if kind in _NESTED else _TALL
    bottom = row + height / 2
    axes.stairs(
        bottom - height * part, (edges - window[0]) / 1e6, baseline=bottom, fill=True, color=_COLORS[kind], zorder=3
    )


def _mark_stalls(axes: Axes, events: Iterable[Event], zero: int, gap: int) -> None:
    """Draw each stall as a pale band through all lanes, so that the links at work meanwhile show."""
    for begin, end in union(((e.begin_ns, e.end_ns) for e in events if e.kind == "stall"), gap):
        axes.axvspan(
            (begin - zero) / 1e6, (end - zero) / 1e6, color=_COLORS["stall"], alpha=0.12, linewidth=0, zorder=1
        )


def _name_halves(axes: Axes, events: list[Event], zero: int) -> None:
    """Write the words forward and backward above their events."""
    for kind in ("forward", "backward"):
        mine = [event for event in events if event.kind == kind]
        if mine:
            middle = (min(e.begin_ns for e in mine) + max(e.end_ns for e in mine)) / 2
            axes.text(
                (middle - zero) / 1e6,
                -_TALL / 2 - 0.04,
                kind,
                ha="center",
                va="bottom",
                fontsize=look.SMALL,
                color=look.NOTE,
            )


def _label(lane: Lane, span_ns: int) -> str:
    busy = f"{format_percent(lane.busy_ns / span_ns)} busy" if span_ns else ""
    if not lane.is_link:
        return f"{lane.name}\n{busy}"
    rate = f" at {lane.gbps:.1f} GB/s" if lane.gbps is not None else ""
    return f"{lane.name}, {busy}\n{format_nbytes(lane.nbytes)}{rate}"


def _subtitle(trace: Trace, step: int | None) -> str:
    parts = ["no events" if step is None else f"step {step}"]
    if trace.device:
        parts.append(trace.device)
    if trace.lost:
        parts.append(f"{trace.lost:,} older events were lost")
    return "; ".join(parts)


def _dress(axes: Axes, lanes: tuple[Lane, ...], summary: Summary, subtitle: str, length_ns: int) -> None:
    words = "; ".join(filter(None, (summary.bound, summary.words)))
    look.heading(axes, words[:1].upper() + words[1:], subtitle)
    axes.set_xlabel("milliseconds from the first event")
    axes.set_xlim(0, length_ns / 1e6 or 1)
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.75)
    axes.set_yticks(range(len(lanes)), [_label(lane, length_ns) for lane in lanes], fontsize=look.SMALL)
    axes.tick_params(axis="y", length=0)
    look.clean(axes, "x")
    axes.spines["left"].set_visible(False)
