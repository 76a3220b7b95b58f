"""A plan as a picture: what memory buys, and what each unit does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from actstore.errors import CapacityError, ConfigError
from actstore.plan.plan import Plan, Row
from actstore.plan.profile import KEEP
from actstore.plan.study import Budget, Study
from actstore.units import format_nbytes

POINTS = 16  # budgets that are planned for
MOST_UNITS = 48  # that have a name of their own at the axis
MOST_DECISIONS = 9  # that have a colour of their own
COLORS = ("#0b6bcb", "#d9640d", "#2a9d5c", "#8b5cc7", "#c2a100", "#c43c5e", "#3aa6b9", "#7a6a53", "#5d7f2a")
KEPT, OTHERS, PLAIN = "#9aa5b1", "#444444", "#222222"
SCALES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def save(plan: Plan, path: Path) -> None:
    """Draw `plan` into the file `path`; its ending (png, svg, pdf) is the format. Asks the solver for some seconds."""
    figure = Figure(figsize=(13, 5.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _front(left, plan, *_scale(max(plan.profile.saved, plan.budget)))
    _units(right, plan, *_scale(max(row.saved for row in plan.rows)))
    figure.savefig(path)


def _scale(largest: float) -> tuple[int, str]:
    return next((scale, unit) for scale, unit in SCALES if max(largest, 1) >= scale)


def _front(axes: Axes, plan: Plan, scale: int, unit: str) -> None:
    """The step under each budget, and this plan's."""
    try:
        front = Study(plan).front(POINTS)
    except (CapacityError, ConfigError) as error:
        axes.text(0.02, 0.02, f"other budgets: {error}", transform=axes.transAxes, fontsize=7, wrap=True)
        front = ()
    _steps(axes, front, plan, scale)
    axes.axhline(plan.plain, color=PLAIN, linewidth=1, linestyle=":", label=f"plain, {plan.plain:.1f} ms")
    axes.axvline(plan.budget / scale, color="#bbbbbb", linewidth=1, label=f"budget, {format_nbytes(plan.budget)}")
    x = plan.predicted.peak / scale
    if plan.bound is not None:
        axes.plot([x], [plan.bound], "_", color=COLORS[0], markersize=16, markeredgewidth=1.6, zorder=4,
                  label=f"no choice is faster, {plan.bound:.1f} ms")  # fmt: skip
    axes.plot([x], [plan.predicted.step], "o", color=COLORS[0], markersize=9, markeredgecolor="white", zorder=5,
              label=f"this plan, {plan.predicted.step:.1f} ms")  # fmt: skip
    if plan.measured is not None:
        axes.plot([plan.measured.peak / scale], [plan.measured.step], "D", color=COLORS[1], markersize=7,
                  markeredgecolor="white", zorder=6, label=f"measured, {plan.measured.step:.1f} ms")  # fmt: skip
    _title(axes, "What memory buys")
    axes.set_xlabel(f"activations at the peak, {unit} (further left is smaller)")
    axes.set_ylabel("step, ms (lower is faster)")
    axes.set_xlim(left=0)
    shown = [plan.plain, plan.predicted.step, plan.measured.step if plan.measured else 0.0]
    slowest = max([*shown, *(budget.step for budget in front)])
    low, high = min(plan.plain, *filter(None, shown)), min(slowest, 1.6 * max(shown))  # the least memory may cost much
    axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low) + 1e-3)
    axes.grid(True, color="#eeeeee")
    _legend(axes)


def _steps(axes: Axes, front: Sequence[Budget], plan: Plan, scale: int) -> None:
    if not front:
        return
    end = max(1.05 * front[-1].device, plan.budget)
    x = [*(budget.device / scale for budget in front), end / scale]
    y = [*(budget.step for budget in front), front[-1].step]
    axes.step(x, y, where="post", color="#9db8d6", linewidth=1.6, zorder=2)
    axes.plot(x[:-1], y[:-1], ".", color="#5d88b8", markersize=7, zorder=3, label="best plan of other budgets")


def _units(axes: Axes, plan: Plan, scale: int, unit: str) -> None:
    """A bar for each unit: held solid, moved hatched, freed pale."""
    decisions = list(dict.fromkeys(row.decision for row in plan.rows if row.decision != KEEP))
    colors = dict.fromkeys(decisions, OTHERS) | dict(zip(decisions[:MOST_DECISIONS], COLORS, strict=False))
    colors[KEEP] = KEPT
    at = range(len(plan.rows))
    color = [colors[row.decision] for row in plan.rows]
    held, moved, freed = ([size / scale for size in sizes] for sizes in zip(*map(_split, plan.rows), strict=True))
    axes.barh(at, held, color=color, height=0.8)
    axes.barh(at, moved, left=held, color="white", edgecolor=color, hatch="////", height=0.8, linewidth=0.6)
    start = [a + b for a, b in zip(held, moved, strict=True)]
    axes.barh(at, freed, left=start, color=color, alpha=0.22, height=0.8)
    every = -(-len(plan.rows) // MOST_UNITS)  # names at the axis: one of so many
    ticks = list(at)[::every]
    axes.set_yticks(ticks, [plan.rows[i].unit or "(model and loss)" for i in ticks], fontsize=8)
    axes.set_ylim(len(plan.rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.04 * max(row.saved for row in plan.rows) / scale or 1.0)
    _title(axes, "What each unit does")
    axes.set_xlabel(f"activations, {unit}: held solid, moved hatched, freed pale")
    for decision in dict.fromkeys(row.decision for row in plan.rows):
        if colors[decision] != OTHERS:
            axes.barh([0], [0], color=colors[decision], label=decision)
    if OTHERS in colors.values():
        axes.barh([0], [0], color=OTHERS, label="other decisions")
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=3)


def _split(row: Row) -> tuple[float, float, float]:
    """What is held, moved, and neither, of what plain training holds."""
    return row.held, row.moved, max(0.0, row.saved - row.held - row.moved)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
