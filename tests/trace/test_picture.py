"""The picture of a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from actstore.trace import Event, Trace
from actstore.trace import picture as timeline
from actstore.trace.summary import Summary

MS = 1_000_000
STEP = [
    Event("forward", 0, 40 * MS),
    Event("encode", 5 * MS, 6 * MS),
    Event("offload", 10 * MS, 30 * MS, "a", 0, "host", 40 * MS),
    Event("backward", 40 * MS, 100 * MS),
    Event("fetch", 50 * MS, 70 * MS, "a", 0, "disk", 10 * MS),
    Event("stall", 60 * MS, 70 * MS, "a", 0, "disk"),
]


def draw(events: list[Event]) -> Figure:
    return timeline.draw(events, Summary.of(events), "a step")


def bars(figure: Figure, kind: str) -> list[tuple[float, float, float]]:
    """Left and right end in ms, and the middle in lanes, of each bar of one kind."""
    found = []
    for shape in figure.axes[0].collections:
        if isinstance(shape, PolyCollection) and tuple(shape.get_facecolor()[0]) == to_rgba(timeline._COLORS[kind]):
            for path in shape.get_paths():
                box = path.get_extents()
                found.append((round(box.x0, 3), round(box.x1, 3), round((box.y0 + box.y1) / 2, 3)))
    return found


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_writes_a_file(tmp_path: Path, ending: str) -> None:
    trace = Trace()
    for event in STEP:
        trace.add(*event)
    timeline.save(trace, tmp_path / f"picture.{ending}")
    assert (tmp_path / f"picture.{ending}").stat().st_size > 5000


@pytest.mark.parametrize("rows", [[], [Event("stall", 5, 5)], [Event("keep", 5, 5)], [Event("fetch", 0, 2**63 - 1)]])
def test_writes_a_file_of_next_to_nothing(tmp_path: Path, rows: list[Event]) -> None:
    trace = Trace()
    for event in rows:
        trace.add(*event)
    timeline.save(trace, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").exists()


def test_bars_are_where_the_events_were() -> None:
    figure = draw(STEP)
    assert bars(figure, "forward") == [(0, 40, 0)]
    assert bars(figure, "encode") == [(5, 6, 0)]
    assert bars(figure, "stall") == [(60, 70, 0)]
    assert bars(figure, "offload") == [(10, 30, 1)]
    assert bars(figure, "fetch") == [(50, 70, 2)]


def test_words_say_the_figures() -> None:
    figure = draw(STEP)
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "Compute 90 % busy; copies hidden: 75 %, stall 10.0 ms of 100.0 ms"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [
        "compute\n90 % busy",
        "offload host, 20 % busy\n38.1 MiB at 2.0 GB/s",
        "fetch disk, 20 % busy\n9.5 MiB at 0.5 GB/s",
    ]
    assert [text.get_text() for text in axes.texts] == ["forward", "backward", "a step"]


def test_a_moment_is_as_wide_as_a_pixel() -> None:
    ((left, right, _),) = bars(draw([*STEP[:2], Event("stall", 20 * MS, 20 * MS + 1)]), "stall")
    assert (left, right) == (20, 20 + 40 / timeline.AXIS_PIXELS)


def test_many_copies_are_drawn_as_the_part_of_time_that_they_fill() -> None:
    """Of each microsecond a quarter in the first half, and three quarters in the second."""
    count = 10_000
    rows = [
        Event("offload", 1000 * i, 1000 * i + (250 if i < count / 2 else 750), f"a[{i}]", 0, "host", 1)
        for i in range(count)
    ]
    figure = draw([Event("forward", 0, 1000 * count), *rows])
    (shape,) = [patch for patch in figure.axes[0].patches if isinstance(patch, StepPatch)]
    values, edges, baseline = shape.get_data()
    heights = (baseline - values) / timeline._TALL
    assert len(heights) == timeline.BINS
    assert heights[:200] == pytest.approx(0.25)
    assert heights[200:] == pytest.approx(0.75)
    assert (edges[0], edges[-1]) == (0, pytest.approx(10))
    assert figure.axes[0].texts[-1].get_text() == "a step; heights: the part of 0.025 ms that is filled"
