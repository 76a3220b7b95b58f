"""Picture of a result: error against bits, and speeds."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from actstore.bench.codecs.contenders import FAMILIES
from actstore.bench.codecs.result import CodecResult, CodecRow, dtypes_of
from actstore.bench.plot import Label, columns, place
from actstore.display import pictures as look

_COLORS = (look.VERMILION, "#b3009e", "#7a5195", look.BLUE, look.GREEN, look.ORANGE, look.GREY)
_COLOR_OF = dict(zip(FAMILIES, _COLORS, strict=True))
_BITS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
_EXACT_FRACTION = 0.4  # marks of lossless codecs lie at this fraction of the least error
_STRIP_FACTOR = 1.6  # factor from the middle of their strip to its edges
_NEAR_RATIO, _MARK_RATIO = 1.03, 1.027  # ratio of sizes that share a place; ratio between their marks there
_COLUMN_SPLIT_BITS = 6.5  # bits from which on a name stands in the right column
_BAR_WIDTH = 0.4  # width, in distances between two codecs


def save(result: CodecResult, path: Path) -> None:
    """Draw `result` into the file `path`; its suffix (png, svg, pdf) is the format.

    The picture shows bfloat16 where it was measured, and codecs of integers.
    """
    dtypes = dtypes_of(result.good)
    dtype = "bfloat16" if "bfloat16" in dtypes else next(iter(dtypes), "")
    rows = [row for row in result.good if row.dtype == dtype or not row.error]
    figure = look.figure(2.6 + max(4.2, 0.24 * len(rows)), width=13)
    left, right = figure.subplots(1, 2, width_ratios=(1.45, 1))
    lossy, exact = _draw_errors(left, [row for row in rows if row.error])
    _draw_speeds(right, rows)
    _dress(left, right, result, dtype)
    used = [family for family in FAMILIES if any(row.family == family for row in rows)]
    if used:
        patches = [Patch(color=_COLOR_OF[family], label=family) for family in used]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(used), frameon=False, fontsize=9)
    figure.draw_without_rendering()
    columns(left, lossy, _COLUMN_SPLIT_BITS, fontsize=8.5)
    place(left, exact, fontsize=8.5)
    figure.savefig(path)


def _draw_errors(axes: Axes, rows: list[CodecRow]) -> tuple[list[Label], list[Label]]:
    """Draw a mark for each codec of floats on its own data, with a line from its least to its largest error.

    Return the names of lossy codecs and those of lossless ones.
    """
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    spans = [[100 * error for error in row.error.values() if error and not row.lossless] for row in rows]
    exact = min((min(span) for span in spans if span), default=1.0) * _EXACT_FRACTION
    lossy: list[Label] = []
    lossless: list[Label] = []
    for row, span, x in zip(rows, spans, side_by_side([row.bits for row in rows]), strict=True):
        color, y = _COLOR_OF[row.family], 100 * (row.error[row.data] or 0) or exact
        if span:
            axes.vlines(x, min(span), max(span), color=color, linewidth=1.5, alpha=0.35)
        marker = "s" if row.lossless else "o"
        axes.scatter([x], [y], s=52, color=color, marker=marker, zorder=3, edgecolors="white")
        name = row.codec if row.data == "gaussian" else f"{row.codec} on {row.data}"
        (lossless if row.lossless else lossy).append(Label(name, x, y, color))
    if lossless:
        axes.axhspan(exact / _STRIP_FACTOR, exact * _STRIP_FACTOR, color="#f1f1f1", zorder=0)
        axes.set_ylim(bottom=exact / _STRIP_FACTOR)
        axes.annotate("exact", (0.008, exact), xycoords=("axes fraction", "data"), va="center", fontsize=9)
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:g}" if value > exact * _STRIP_FACTOR else "")
        )
    axes.set_xlim(0.85, 40)
    return lossy, lossless


def side_by_side(bits: list[float]) -> list[float]:
    """Return positions of the marks: marks of nearly the same size stand a little apart, around their place."""
    found = list(bits)
    order = sorted(range(len(bits)), key=bits.__getitem__)
    while order:
        near = [index for index in order if bits[index] < bits[order[0]] * _NEAR_RATIO]
        for at, index in enumerate(near):
            found[index] *= _MARK_RATIO ** (at - (len(near) - 1) / 2)
        order = order[len(near) :]
    return found


def _draw_speeds(axes: Axes, rows: list[CodecRow]) -> None:
    """Draw two bars for each codec: encode above decode."""
    speeds = [(at, row, speed) for at, row in enumerate(rows) for speed in (row.encode, row.decode) if speed]
    longest = max((speed.quartiles[1] for _, _, speed in speeds), default=1.0)
    for at, row, speed in speeds:
        low, middle, high = speed.quartiles
        y, alpha = (at - 0.5 * _BAR_WIDTH, 1.0) if speed is row.encode else (at + 0.5 * _BAR_WIDTH, 0.45)
        axes.barh(y, middle, height=_BAR_WIDTH, color=_COLOR_OF[row.family], alpha=alpha)
        axes.hlines(y, low, high, color="#333333", linewidth=0.8)
        end = min(max(high, middle), longest)
        axes.annotate(f"{middle:.2f}", (end, y), (3, 0), textcoords="offset points", va="center", fontsize=6)
    axes.set_xlim(0, 1.1 * longest)
    axes.set_yticks(range(len(rows)), [row.codec if row.error else f"{row.codec} of {row.dtype}" for row in rows])
    axes.tick_params(axis="y", labelsize=8.5, length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _dress(left: Axes, right: Axes, result: CodecResult, dtype: str) -> None:
    env, setting = result.environment, result.setting
    notes = (
        f"{dtype}; marks: Gaussian data unless named; lines: best to worst of six kinds of data",
        f"encode above decode; {setting['size_mb']:g} MB, {env['processor']}, {setting['threads']} threads",
    )
    titles = ("What each codec loses and what it keeps", "How fast, copy_ of the same tensor = 1")
    for axes, title, note in zip((left, right), titles, notes, strict=True):
        look.heading(axes, title, note)
        look.clean(axes, "both" if axes is left else "x")
    left.set_xlabel("bits per element (further left is smaller)")
    left.set_ylabel("relative L2 error, % (lower is better)")
    left.set_xticks(_BITS)
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.xaxis.set_minor_formatter(NullFormatter())
    right.set_xlabel("multiple of copy_ (longer is faster)")
    right.axvline(1, color="#999999", linewidth=1, zorder=0)
