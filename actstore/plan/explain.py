"""Text of a plan: at most one screen for a model of a dozen blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actstore.base.units import format_nbytes
from actstore.display import html
from actstore.display.naming import pattern_of, short
from actstore.display.text import columns, percent, unwrapped, wrapped
from actstore.errors import CapacityError, ConfigError
from actstore.plan.decisions import KEEP
from actstore.plan.study import Budget, Other, Study

if TYPE_CHECKING:
    from actstore.plan.values import PlanValues, UnitPlan

SMALL_SHARE = 0.25  # of the device memory: activations that take less are not the problem
NOTABLE_SHARE = 0.03  # of the saved bytes: units that save less get no reason in the text
SHOWN_BUDGETS = 6
COUNTS_WIDTH = 56  # characters
SHOWN_REASONS = 3  # to plan again: the last ones
TIE_SHARE = 0.001  # of the step: decisions that differ by less count as equally fast
BUDGETS_TITLE = "What memory buys:"
MODEL_LABEL = "(model and loss)"  # the unit of tensors that the model itself and the loss save


@dataclass(frozen=True)
class UnitGroup:
    """Units of one name pattern with the same decision; `first` is the index of the first of them."""

    first: int
    rows: list[UnitPlan]

    @property
    def name(self) -> str:
        return short([row.unit or MODEL_LABEL for row in self.rows])

    def total(self, name: str) -> float:
        return sum(float(getattr(row, name)) for row in self.rows)


def groups_of(plan: PlanValues) -> list[UnitGroup]:
    """Return the units of a plan in groups, ordered by the first unit of each."""
    found: dict[tuple[str, str | None], UnitGroup] = {}
    for place, row in enumerate(plan.rows):
        key = row.decision, pattern_of(row.unit) if row.unit else None
        found.setdefault(key, UnitGroup(place, [])).rows.append(row)
    return list(found.values())


def explain(plan: PlanValues) -> str:
    """Return the text of a plan: decisions and their reasons, gains of more memory, the step's limit, memory use."""
    study, groups = Study(plan), groups_of(plan)
    budgets = _budgets(plan, study)
    parts: list[Iterable[str]] = [
        _headline(plan),
        columns(_table(groups)),
        _reasons(plan, study, groups),
        _limits(plan),
    ]
    parts.append(wrapped(budgets) if isinstance(budgets, str) else [BUDGETS_TITLE, *columns(budgets, numbers=True)])
    parts += [_memory(plan), _history(plan)]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def to_html(plan: PlanValues) -> str:
    """Return the same content as HTML, for notebooks."""
    study, groups = Study(plan), groups_of(plan)
    units, budgets = _table(groups), _budgets(plan, study)
    largest = max(group.total("saved") for group in groups) or 1.0
    parts = [html.table(units[0], units[1:], words=(0, 6), bar=2, bars=[g.total("held") / largest for g in groups])]
    parts += [html.items(unwrapped(_reasons(plan, study, groups))), html.line(" ".join(_limits(plan)))]
    if isinstance(budgets, str):
        parts.append(html.line(budgets))
    else:
        parts += [html.line(BUDGETS_TITLE), html.table(budgets[0], budgets[1:], words=(3, 4))]
    parts.append(html.line(" ".join(_memory(plan))))
    first, *why = list(_history(plan)) or [""]
    parts += [html.line(first), html.items(unwrapped(why))]
    return html.section(" ".join(_headline(plan)), *parts)


def _headline(plan: PlanValues) -> Iterator[str]:
    yield from wrapped(
        f"Budget {format_nbytes(plan.budget)} for {format_nbytes(plan.profile.saved)} of activations: "
        f"{plan.certificate}, {_times(plan.predicted.step, plan)} plain ({plan.plain:.1f} ms); "
        f"peak {format_nbytes(plan.predicted.peak)}."
    )
    if granted := plan.limits.get("max_noise"):
        yield from wrapped(
            f"Lossy payloads add {percent(plan.predicted.noise, '.2g')} to the noise of the gradients from batch to "
            f"batch, of {percent(granted, '.2g')} that are granted."
        )
    if plan.measured is not None:
        off = percent(plan.measured.step / plan.predicted.step - 1, "+.1f") if plan.predicted.step else "no prediction"
        peak = format_nbytes(plan.measured.peak)
        if plan.budget:
            peak += f", {percent(plan.measured.peak / plan.budget)} of the budget"
        yield from wrapped(f"Measured: {plan.measured.step:.1f} ms a step ({off}), peak {peak}.")
    if plan.rival:
        yield from wrapped(plan.rival)


def _table(groups: Sequence[UnitGroup]) -> list[tuple[str, ...]]:
    cells: list[tuple[str, ...]] = [("unit", "saved", "held", "moved", "adds ms", "waits ms", "decision")]
    for group in groups:
        sizes = (format_nbytes(group.total(name)) for name in ("saved", "held", "moved"))
        times = (f"{group.total(name):.2f}" for name in ("extra", "stall"))
        cells.append((group.name, *sizes, *times, group.rows[0].decision))
    return cells


def _reasons(plan: PlanValues, study: Study, groups: Sequence[UnitGroup]) -> Iterator[str]:
    """Yield the reason for the decision of each notable group: the alternatives of one unit, the rest as planned."""
    for group in groups:
        if group.total("saved") < NOTABLE_SHARE * plan.profile.saved:
            continue
        others = study.others(group.first)
        freed, ms = group.total("saved") - group.total("held"), group.total("extra") + group.total("stall")
        if group.rows[0].decision == KEEP:
            said = [f"costs no time, holds {format_nbytes(group.total('held'))}"]
        else:
            said = [f"frees {format_nbytes(freed)} for {ms:.1f} ms"]
        said += _alternatives(plan, group.rows[0].decision, others)
        if len(said) > 1 and len(group.rows) > 1:
            said[1] = f"in one of them {said[1]}"
        yield from wrapped(f"{group.name}: {'; '.join(said)}.", "  ")


def _alternatives(plan: PlanValues, decision: str, others: Sequence[Other]) -> Iterator[str]:
    tie = TIE_SHARE * plan.predicted.step
    keep = next((other for other in others if other.decision == KEEP), None)
    barred = [other for other in others if other.breaks and other.slower < -tie]
    best = keep if keep is not None and keep.breaks else next(iter(barred), None)
    if best is not None:
        faster = f"would be {-best.slower:.1f} ms faster, but" if best.slower < -tie else "does not fit:"
        yield f"{best.decision!r} {faster} {_why_not(best)}"
    allowed = [other for other in others if not other.breaks]
    if allowed:
        best = allowed[0]
        slower = f"be {best.slower:.1f} ms slower" if best.slower > tie else "do as well"
        yield f"{best.decision!r} would {slower}"
    elif best is None and others and decision != KEEP:
        yield "nothing else fits"


def _why_not(other: Other) -> str:
    if "device" in other.breaks:
        return f"the budget is {format_nbytes(other.over)} short"
    words = {"host": "host memory is too small", "disk": "the disk's budget is too small", "error": "loses too much"}
    return words[other.breaks[0]]


def _limits(plan: PlanValues) -> Iterator[str]:
    added = sum(row.extra for row in plan.rows)
    waits = max(0.0, plan.predicted.step - plan.plain - added)
    text = f"What limits the step: {plan.limit}."
    if added + waits > TIE_SHARE * plan.plain:
        text += (
            f" Beyond the {plan.plain:.1f} ms of plain training, {added:.1f} ms are recomputation and encoding, "
            f"{waits:.1f} ms waits for copies."
        )
    unit, scale = ("GiB", 1024) if plan.budget >= 4 * 2**30 else ("MiB", 1)
    words = {"device": "on the device", "host": "of host memory", "disk": "of disk"}
    bought = [
        f"one more {unit} {words[n]} saves {ms * scale:.2g} ms" for n, ms in plan.prices.items() if n in words and ms
    ]
    if bought:
        text += f" At the margin, {' and '.join(bought)} a step."
    yield from wrapped(text)


def _budgets(plan: PlanValues, study: Study) -> list[tuple[str, ...]] | str:
    """Return a row for each of several budgets, or the reason why the solver gives none."""
    try:
        front = study.front(SHOWN_BUDGETS)
    except (CapacityError, ConfigError) as error:
        return f"What more memory would buy: not known ({error})."
    mine = Budget(plan.budget, plan.predicted.step, tuple(row.decision for row in plan.rows))
    near = 0.02 * max(plan.budget, *(budget.device for budget in front))
    rows = sorted([mine, *(b for b in front if abs(b.device - mine.device) > near)], key=lambda b: b.device)
    cells: list[tuple[str, ...]] = [("budget", "step ms", "plain = 1", "", "units")]
    for budget in rows:
        what = "this plan" if budget is mine else "least" if budget is rows[0] else ""
        cells.append((
            format_nbytes(budget.device), f"{budget.step:.1f}", f"{budget.step / plan.plain:.3f}" if plan.plain else "",
            what, _counts(plan, budget.decisions),
        ))  # fmt: skip
    return cells


def _counts(plan: PlanValues, decisions: Sequence[str]) -> str:
    """Return the number of notable units for each decision."""
    notable = NOTABLE_SHARE * plan.profile.saved
    counts = Counter(d for row, d in zip(plan.rows, decisions, strict=False) if row.unit and row.saved >= notable)
    shown, left = "", counts.total()
    for decision, count in counts.most_common():
        piece = f"{', ' if shown else ''}{count} {decision}"
        if len(shown) + len(piece) > COUNTS_WIDTH:
            return f"{shown}{', ' if shown else ''}{left} otherwise"
        shown, left = shown + piece, left - count
    return shown


def _memory(plan: PlanValues) -> Iterator[str]:
    """Yield the uses of device memory, and whether activations are the problem."""
    memory = plan.profile.memory
    itself = sum(row.held for row in plan.rows if not row.unit)
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer states": memory.optimizer or 0,
        "buffers": memory.buffers,
        "temporary results": memory.temporary or 0,
        "activations": max(0.0, plan.predicted.peak - itself),
        "the model itself and its loss (logits)": itself,
    }
    total = sum(parts.values())
    if not total:
        return
    shown = ", ".join(
        f"{name} {format_nbytes(n)} ({percent(n / total, '.0f')})" for name, n in parts.items() if n >= 0.005 * total
    )
    unknown = "" if memory.optimizer is not None else "; no optimizer has stepped, so its states are not counted"
    yield from wrapped(f"Where {format_nbytes(total)} of device memory go: {shown}{unknown}.")
    yield from _bound(plan)
    if memory.updating > plan.predicted.peak + (memory.temporary or 0):
        yield from wrapped(
            f"The optimizer sets the peak: its step needs about {format_nbytes(memory.updating)} beside its states, "
            f"activations at most {format_nbytes(plan.predicted.peak)}. Give it fused=True or foreach=False."
        )
    if itself > plan.predicted.peak / 2:
        yield from wrapped(
            f"The model itself and its loss hold {format_nbytes(itself)}, more than all units together, and no "
            "decision of a unit frees that: with a large vocabulary these are logits; compute the loss in chunks."
        )
    if plan.profile.saved < SMALL_SHARE * (total - plan.predicted.peak + plan.profile.saved):
        largest = max(("parameters", "gradients", "optimizer states"), key=parts.__getitem__)
        advice = {
            "parameters": "shard them (FSDP2), or keep them in fewer bits",
            "gradients": "shard them (FSDP2), or train fewer parameters (LoRA)",
            "optimizer states": "use an optimizer with 8-bit states, or shard them (FSDP2)",
        }
        yield from wrapped(
            f"Activations are not the problem here: even all kept they are {format_nbytes(plan.profile.saved)}. "
            f"Most is in {largest}: {advice[largest]}."
        )


def _bound(plan: PlanValues) -> Iterator[str]:
    """Yield what the total bounds, where the user has given one."""
    total = plan.limits.get("total")
    if total is None:
        return
    if plan.profile.memory.temporary is None:
        yield from wrapped(
            f"Temporary results come on top of the total of {format_nbytes(total)}: no allocator has counted them."
        )
    else:
        yield from wrapped(
            f"The total of {format_nbytes(total)} bounds their sum: activations may hold up to "
            f"{format_nbytes(plan.budget)}."
        )


def _history(plan: PlanValues) -> Iterator[str]:
    if plan.history:
        earlier = len(plan.history) - SHOWN_REASONS
        yield f"Planned again{f', {earlier} times before and' if earlier > 0 else ''} because"
        yield from (line for why in plan.history[-SHOWN_REASONS:] for line in wrapped(why, "  "))


def _times(step: float, plan: PlanValues) -> str:
    return f"{step / plan.plain:.3f} times" if plan.plain else "with"
