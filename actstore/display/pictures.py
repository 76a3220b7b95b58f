"""Colors, sizes and headings of all pictures."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from textwrap import fill
from typing import Literal, NamedTuple

from actstore.display.colors import SERIES
from actstore.errors import ConfigError

try:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "matplotlib":
        raise
    raise ConfigError("pictures need matplotlib, which is not installed. Run pip install 'actstore[bench]'.") from error

BLUE, VERMILION, GREEN, PURPLE, ORANGE = SERIES[:5]
BLACK = "#222222"
GREY, NOTE, RULE, GRID = "#6f6f6f", "#555555", "#cccccc", "#eeeeee"
MARKERS = "osD^vPX*<"
TIMES = {  # by the kind of work in a step
    "forward": "#cfe0f3",
    "backward": "#dcd3ee",
    "recompute": "#9aa5b1",
    "encode": BLUE,
    "decode": PURPLE,
    "stall": VERMILION,
}

WIDTH, DPI = 9.0, 150  # WIDTH in inches; shown at 800 pixels, a letter of 9 points is 11 pixels high
SMALL, NORMAL = 8.5, 9.0  # points


class RowStyle(NamedTuple):
    """The style of all rows of one kind."""

    label: str
    color: str
    marker: str


KINDS = {
    "plain": RowStyle("plain PyTorch", BLACK, "s"),
    "peer": RowStyle("other libraries", GREY, "^"),
    "lossless": RowStyle("actstore, exact gradients", BLUE, "o"),
    "lossy": RowStyle("actstore, lossy", VERMILION, "D"),
}


class Picture(Figure):
    """A figure that notebooks show without pyplot."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def figure(height: float, width: float = WIDTH) -> Figure:
    """Return an empty picture of a size in inches, whose layout makes room for its texts."""
    made = Picture(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(made)
    return made


def heading(axes: Axes, title: str, note: str = "", letters: int = 128) -> None:
    """Write a title above the axes, and below it `note` in small letters, in lines of at most `letters` characters."""
    text = fill(note, letters)
    lines = text.count("\n") + 1 if note else 0
    axes.set_title(title, loc="left", fontweight="bold", pad=6 + 13 * lines)
    if note:
        axes.annotate(
            text, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=SMALL, color=NOTE
        )


def clean(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Draw a pale grid behind everything, and remove the top and right frame."""
    axes.grid(True, axis=grid, color=GRID, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(axes: Axes, labels: Sequence[str] | None = None, handles: Sequence[Artist] | None = None) -> None:
    """Draw the legend at the right of the axes, with these texts and marks in place of the axes' own."""
    marks, own = axes.get_legend_handles_labels()
    axes.legend(handles or marks, labels or own, frameon=False, fontsize=SMALL, loc="upper left", bbox_to_anchor=(1, 1))
