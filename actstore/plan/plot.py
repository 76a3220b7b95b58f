"""Picture of a plan: the gains of more memory, and the decision of each unit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actstore.base.units import format_nbytes
from actstore.display import bars as units
from actstore.display import pictures as look
from actstore.display.bars import Bar
from actstore.display.colors import SERIES
from actstore.errors import CapacityError, ConfigError
from actstore.plan.study import Budget, Study
from actstore.plan.values import PlanValues

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FRONT_POINTS = 16  # budgets with a plan of their own


def save(plan: PlanValues, path: Path) -> None:
    """Draw `plan` into the file `path`; its ending (png, svg, pdf) is the format."""
    draw(plan).savefig(path)


def draw(plan: PlanValues) -> Figure:
    """Draw the figure of a plan. The solver runs for some seconds."""
    bars = [Bar(row.unit or "(model and loss)", row.decision, row.saved, row.held, row.moved) for row in plan.rows]
    height = units.height(len(bars))
    figure = look.figure(4.4 + height)
    above, below = figure.subplots(2, 1, height_ratios=(4.4, height))
    _front(above, plan, *units.scale(max(plan.profile.saved, plan.budget)))
    units.draw(below, bars, "What each unit does")
    return figure


def _front(axes: Axes, plan: PlanValues, scale: int, unit: str) -> None:
    """Draw the step time under each budget, and this plan's."""
    try:
        front = Study(plan).front(FRONT_POINTS)
    except (CapacityError, ConfigError) as error:
        axes.text(0.02, 0.02, f"other budgets: {error}", transform=axes.transAxes, fontsize=7, wrap=True)
        front = ()
    _steps(axes, front, plan, scale)
    axes.axhline(plan.plain, color=look.BLACK, linewidth=1, linestyle=":", label=f"plain, {plan.plain:.1f} ms")
    axes.axvline(plan.budget / scale, color=look.RULE, linewidth=1, label=f"budget, {format_nbytes(plan.budget)}")
    x = plan.predicted.peak / scale
    if plan.bound is not None:
        axes.plot([x], [plan.bound], "_", color=SERIES[0], markersize=16, markeredgewidth=1.6, zorder=4,
                  label=f"no choice is faster, {plan.bound:.1f} ms")  # fmt: skip
    axes.plot([x], [plan.predicted.step], "o", color=SERIES[0], markersize=9, markeredgecolor="white", zorder=5,
              label=f"this plan, {plan.predicted.step:.1f} ms")  # fmt: skip
    if plan.measured is not None:
        axes.plot([plan.measured.peak / scale], [plan.measured.step], "D", color=SERIES[1], markersize=7,
                  markeredgecolor="white", zorder=6, label=f"measured, {plan.measured.step:.1f} ms")  # fmt: skip
    look.heading(axes, "What memory buys")
    axes.set_xlabel(f"activations at the peak, {unit} (further left is smaller)")
    axes.set_ylabel("step, ms (lower is faster)")
    axes.set_xlim(left=0)
    shown = [plan.plain, plan.predicted.step, plan.measured.step if plan.measured else 0.0]
    slowest = max([*shown, *(budget.step for budget in front)])
    low, high = min(plan.plain, *filter(None, shown)), min(slowest, 1.6 * max(shown))  # the least memory may cost much
    axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low) + 1e-3)
    look.clean(axes)
    look.legend(axes)


def _steps(axes: Axes, front: Sequence[Budget], plan: PlanValues, scale: int) -> None:
    if not front:
        return
    end = max(1.05 * front[-1].device, plan.budget)
    x = [*(budget.device / scale for budget in front), end / scale]
    y = [*(budget.step for budget in front), front[-1].step]
    axes.step(x, y, where="post", color="#9db8d6", linewidth=1.6, zorder=2)
    axes.plot(x[:-1], y[:-1], ".", color="#5d88b8", markersize=7, zorder=3, label="best plan of other budgets")
