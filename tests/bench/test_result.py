"""The JSON and the table."""

from __future__ import annotations

import json
import math
from io import StringIO

from rich.console import Console

from actstore.bench.result import Result, RowResult
from actstore.bench.table import render

NAMES = {"name", "step_ms", "ratio", "saved_bytes", "held_bytes", "peak_bytes", "loss", "grad_error"}


def test_json_has_the_promised_names(result: Result) -> None:
    values = json.loads(result.to_json())
    assert set(values) == {"environment", "workload", "rows", "left_out", "duels"}
    assert all(set(row) >= NAMES for row in values["rows"])
    assert Result.from_json(result.to_json()) == result


def test_json_stays_strict_with_figures_that_are_not_finite(result: Result) -> None:
    result.rows[0].loss = math.nan
    result.rows[0].grad_error = math.inf
    row = json.loads(result.to_json(), parse_constant=lambda name: 1 / 0)["rows"][0]
    assert row["loss"] is None
    assert row["grad_error"] is None


def test_times_are_paired() -> None:
    row = RowResult("int8", "ours")
    row.set_times([10.0, 30.0, 12.0], [10.0, 20.0, None])
    assert row.step_ms == 12.0
    assert row.ratio == 1.25
    row.set_times([10.0], [None])
    assert row.ratio is None


def test_a_busy_machine_is_named(result: Result) -> None:
    quiet, busy = [600.0, 610.0, 590.0, 620.0] * 5, [600.0, 610.0, 2000.0, 3000.0] * 5
    result.rows[0].set_times(quiet, list(quiet))
    assert result.busy is None
    result.rows[0].set_times(busy, list(busy))
    assert result.busy is not None
    console = Console(width=100, file=StringIO(), color_system=None)
    console.print(render(result))
    assert "The machine was busy" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_shows_everything_in_100_columns(result: Result) -> None:
    console = Console(width=100, file=StringIO(), color_system=None)
    console.print(render(result))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    for row in result.rows:
        assert row.name in text
    for words in (
        "raw @ disk failed: OSError: the disk is full",
        "bitsandbytes 8-bit is left out",
        "1.30",
        "0 (exact)",
    ):
        assert words in text
