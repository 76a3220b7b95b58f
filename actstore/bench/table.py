"""Table of a result, for people."""

from __future__ import annotations

import math

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from actstore.bench.comparison import versus
from actstore.bench.result import Result, RowResult

MIB = 2**20
DUELS = "Each peer, and the fastest row of ours that holds no more and is as exact:"
_COLUMNS = ("step\nms", "times\nplain", "saved\nMiB", "held\nMiB", "held\n%", "peak\nMiB", "\nloss", "gradient\nerror")
_LIBRARIES = "libraries\nMiB"  # the last column


def render(result: Result) -> RenderableType:
    """Return the table with its legend; readable in 100 columns."""
    notes = [Text(text, style="red" if text in _failures(result) else "yellow") for text in _notes(result)]
    return Group(rows_table(result), Text(_legend(result), style="dim"), *_duels(result), Text(), *notes)


def rows_table(result: Result) -> Table:
    """Return the table alone."""
    table = Table(
        title=_title(result), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("\nrow", max_width=32)
    for column in (*_COLUMNS, _LIBRARIES):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(Text(row.name), *cells(row), mib(row.libraries_bytes), style="red" if row.failed else None)
    return table


def _failures(result: Result) -> list[str]:
    return [f"{row.name} failed: {row.failed}" for row in result.failed]


def _notes(result: Result) -> list[str]:
    """Return the failures, and the caveats about the figures."""
    notes = _failures(result)
    notes += [
        f"{row.name} leaves other buffers (running statistics) than plain: {100 * row.state_error:.2g} % off"
        for row in result.rows
        if row.state_error
    ]
    notes += [f"{out['name']} is left out: {out['reason']}" for out in result.left_out]
    if result.busy:
        low, high = result.busy
        notes.append(
            f"The machine was busy: half of plain's steps took {low:.0f} to {high:.0f} ms. Run again when it is quiet."
        )
    return notes


def _duels(result: Result) -> list[RenderableType]:
    """Return each peer beside the row of actstore that it is compared with; nothing without peers."""
    found = versus(result.rows, result.duels)
    if not found:
        return []
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("peer", "ours"):
        table.add_column(name)
    table.add_column("our time over its", justify="right")
    for one in found:
        times = "" if one.times is None else f"{one.times:.2f}"
        table.add_row(
            Text(one.peer), Text(one.ours or one.reason), times, style=None if one.verdict == "faster" else "yellow"
        )
    return [Text(f"\n{DUELS}", style="bold"), table]


def _title(result: Result) -> str:
    return f"{result.subject}\n{result.place}, torch {result.environment['torch']}"


def cells(row: RowResult) -> list[str]:
    fraction = row.held_fraction
    return [
        number(row.step_ms, ".1f" if (row.step_ms or 0) < 100 else ".0f"),
        _ratio(row),
        mib(row.saved_bytes),
        mib(row.held_bytes),
        number(None if fraction is None else 100 * fraction, ".1f"),
        mib(row.peak_bytes),
        number(row.loss, ".4f"),
        _error(row),
    ]


def number(value: float | None, form: str) -> str:
    """Format a figure; a hyphen for none."""
    return "-" if value is None else format(value, form)


def _ratio(row: RowResult) -> str:
    return number(row.ratio, ".2f") + (f" ±{row.spread:.2f}" if row.spread else "")


def mib(nbytes: int | None) -> str:
    """Format bytes in MiB; a hyphen for none."""
    return "-" if nbytes is None else f"{nbytes / MIB:.1f}"


def _error(row: RowResult) -> str:
    if row.bit_equal is None or row.grad_error is None:
        return "-"
    if row.bit_equal:
        return "0 (exact)"
    if not math.isfinite(row.grad_error):
        return "not finite"
    percent = 100 * row.grad_error
    return f"{percent:.2f} %" if percent >= 0.01 else f"{percent:.1e} %"


def _legend(result: Result) -> str:
    work = result.workload
    cuda = work["device"].startswith("cuda")
    peak = "what the GPU's allocator gave out" if cuda else "the process's resident memory"
    more = "" if cuda else ",\n      and what the C allocator keeps of freed blocks, unless actstore's is in its place"
    libraries = "" if cuda else "\nlibraries: part of the peak that imports and kernels add to torch and actstore."
    same = "" if cuda else " On a CPU host memory is that device."
    return (
        f"step: median of {work['steps']} steps, forward to optimizer. Times plain: over pairs of neighboring steps,\n"
        "± half of the distance between their quartiles.\n"
        "saved: what plain autograd would hold, each storage once, parameters excluded.\n"
        f"held: on the compute device at the end of forward; % of saved.{same}\n"
        f"peak: high-water of {peak}; more than held: it has weights, gradients, optimizer, libraries{more}.\n"
        f"loss: after {work['warmup'] + work['steps']} steps. "
        "Gradient error: |g - g_plain| / |g_plain| over all parameters, same batch."
        f"{libraries}"
    )
