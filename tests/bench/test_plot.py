"""The picture."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from actstore.bench import plot
from actstore.bench.result import Result


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_writes_a_file(result: Result, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"picture.{ending}"
    plot.save(result, path)
    assert path.stat().st_size > 5000


def test_writes_a_file_without_any_figure(result: Result, tmp_path: Path) -> None:
    result.rows = result.rows[-1:]
    plot.save(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").exists()


def test_names_do_not_overlap(result: Result) -> None:
    figure = Figure(figsize=(9, 5.6), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlim=(0.95, 1.4), ylim=(-20, 220))
    figure.draw_without_rendering()
    plot.place(axes, plot.labels(result.rows[:-1]))
    boxes = [plot.extent(name) for name in axes.texts]  # type: ignore[arg-type]
    assert len(boxes) == len(result.rows) - 1
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
