"""A result as a table for people."""

from __future__ import annotations

import math

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from actstore.bench.result import Result, RowResult

MIB = 2**20
_COLUMNS = ("step\nms", "times\nplain", "saved\nMiB", "held\nMiB", "held\n%", "peak\nMiB", "\nloss", "gradient\nerror")


def render(result: Result) -> RenderableType:
    """The table with its legend; readable in 100 columns."""
    table = Table(
        title=_title(result), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("\nrow", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(Text(row.name), *_cells(row), style="red" if row.failed else None)
    notes = [Text(f"{row.name} failed: {row.failed}", style="red") for row in result.failed]
    notes += [Text(f"{out['name']} is left out: {out['reason']}", style="yellow") for out in result.left_out]
    if result.busy:
        low, high = result.busy
        words = (
            f"The machine was busy: half of plain's steps took {low:.0f} to {high:.0f} ms. Run again when it is quiet."
        )
        notes.append(Text(words, style="yellow"))
    return Group(table, Text(), *notes, Text(_legend(result), style="dim"))


def _title(result: Result) -> str:
    work, env = result.workload, result.environment
    cuda = work["device"].startswith("cuda")
    where = env["gpu"] if cuda else f"{env['processor']}, {work['threads'] or env['cores']} threads"
    return (
        f"GPT {work['layers']} layers, width {work['width']}, context {work['context']}, batch {work['batch']}, "
        f"{work['dtype']}\n{where}, torch {env['torch']}"
    )


def _cells(row: RowResult) -> list[str]:
    fraction = row.held_fraction
    return [
        _number(row.step_ms, ".1f" if (row.step_ms or 0) < 100 else ".0f"),
        _number(row.ratio, ".2f"),
        _mib(row.saved_bytes),
        _mib(row.held_bytes),
        _number(None if fraction is None else 100 * fraction, ".1f"),
        _mib(row.peak_bytes),
        _number(row.loss, ".4f"),
        _error(row),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _mib(nbytes: int | None) -> str:
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
    peak = "what the GPU's allocator gave out" if work["device"].startswith("cuda") else "the process's resident memory"
    same = "" if work["device"].startswith("cuda") else " On a CPU host memory is that device."
    return (
        f"step: median of {work['steps']} steps, forward to optimizer. Times plain: over pairs of neighbouring steps.\n"
        "saved: what plain autograd would hold, each storage once, parameters excluded.\n"
        f"held: on the compute device at the end of forward; % of saved.{same}\n"
        f"peak: high-water of {peak}, model and libraries included.\n"
        f"loss: after {work['warmup'] + work['steps']} steps. "
        "Gradient error: |g - g_plain| / |g_plain| over all parameters, same batch."
    )
