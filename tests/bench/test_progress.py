"""The lines and the table that a run shows before its end."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from actstore.bench import progress
from actstore.bench.peers.rows import PLAIN, Row
from actstore.bench.progress import TimeLeft, run_shown
from actstore.bench.result import Result
from actstore.bench.workloads.workload import Workload

ROWS = [PLAIN, Row("a peer", "peer"), Row("int8", "ours", "int8"), Row("no one", "ours", "int8")]


class Clock:
    """Seconds, set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "monotonic", found)
    return found


def test_rows_to_come_take_the_mean_of_those_that_are_done(clock: Clock) -> None:
    left = TimeLeft(5)
    clock.now = 10.0
    assert not str(left)  # plain alone says little about the others
    clock.now = 40.0
    left.row_done()
    assert str(left) == "1:00 left"  # three rows of 20 s each
    clock.now = 45.0
    assert left.seconds == 55.0
    clock.now = 200.0
    assert left.seconds == 0.0


def shown(result: Result, monkeypatch: pytest.MonkeyPatch, clock: Clock, *, terminal: bool) -> str:
    """Return what a console shows while plain, a peer, int8 and a row that is left out run, ten seconds each."""

    def run(work, rows, disk_path, step=None, row_done=None, repeats=1):  # type: ignore[no-untyped-def]
        so_far = Result(result.environment, result.workload, [result.rows[0]])
        for row in (result.rows[1], result.rows[3], None):
            clock.now += 10
            if row is not None:
                so_far.rows.append(row)
                if step is not None:
                    step(row.name)
            row_done(so_far)
        return so_far

    monkeypatch.setattr(progress, "run", run)
    console = Console(file=StringIO(), force_terminal=terminal, width=100, color_system=None)
    found = run_shown(Workload(), ROWS, None, 1, console)
    assert len(found.rows) == 3
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_without_a_terminal_each_row_is_a_line(result: Result, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    assert shown(result, monkeypatch, clock, terminal=False).splitlines() == [
        "2/4 a peer: 1.01 times plain, 200.0 MiB held, gradient error 0 (exact); 0:10 left",
        "3/4 int8: 1.10 times plain, 52.0 MiB held, gradient error 2.00 %; 0:07 left",
    ]


def test_on_a_terminal_the_table_grows(result: Result, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    text = shown(result, monkeypatch, clock, terminal=True)
    assert "gradient" in text  # the head of the table
    assert "52.0" in text  # the cells of int8
    assert "left" in text
