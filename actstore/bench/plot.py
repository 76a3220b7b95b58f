"""A result as a picture: memory held against time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from actstore.bench.labels import Label, place
from actstore.bench.result import Result, RowResult
from actstore.bench.table import MIB


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
    place(axes, _labels(rows))
    figure.savefig(path)


def _kind(row: RowResult) -> str:
    if row.kind == "ours":
        return "lossless" if row.bit_equal else "lossy"
    return row.kind


def _height(row: RowResult) -> float:
    return (row.held_bytes or 0) / MIB


def _labels(rows: list[RowResult]) -> list[Label]:
    return [Label(row.name, row.ratio or 0.0, _height(row), _LOOKS[_kind(row)].color) for row in rows]


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
