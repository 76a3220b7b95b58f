"""Two results beside each other: what counts as worse, and what is refused."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")

from actstore.bench import compare
from actstore.bench.comparison import changes, differences, packages
from actstore.bench.result import Result
from actstore.cli import app as cli
from actstore.display.text import TABLE_WIDTH
from actstore.errors import ConfigError


@pytest.fixture
def timed(result: Result) -> Result:
    """With pairs of steps that vary by some percent."""
    draw = random.Random(1)
    for row in result.rows:
        if row.ratio is not None:
            row.set_times([600 * row.ratio * draw.uniform(0.96, 1.04) for _ in range(12)], [600.0] * 12)
    return result


def grown(result: Result, name: str, times: float = 1.0, held: float = 1.0) -> Result:
    """A copy in which one row takes and holds so many times as much."""
    copy = Result.from_json(result.to_json())
    row = next(row for row in copy.rows if row.name == name)
    row.set_times([ms * times for ms in row.step_samples_ms], row.plain_samples_ms)
    row.held_bytes = int((row.held_bytes or 0) * held)
    return copy


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: Result, new: Result, *flags: str) -> int:
    old.write(tmp_path / "old.json")
    new.write(tmp_path / "new.json")
    command = ["actstore", "bench", "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *flags]
    monkeypatch.setattr(sys, "argv", command)
    try:
        cli.main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


@pytest.mark.parametrize(
    ("times", "held", "code"),
    [(1.0, 1.0, 0), (1.3, 1.0, 1), (1.0, 1.2, 1), (1.02, 1.0, 0), (1.0, 1.04, 0), (0.7, 0.5, 0)],
)
def test_the_exit_code_says_whether_a_row_grew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timed: Result, times: float, held: float, code: int
) -> None:
    new = grown(timed, "int8", times, held)
    assert run(monkeypatch, tmp_path, timed, new, "--fail-above", "5%") == code
    assert run(monkeypatch, tmp_path, timed, new) == 0


def test_growth_within_the_noise_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timed: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    row = timed.rows[3]
    row.set_times([600.0, 900.0, 620.0, 1100.0], [600.0] * 4)
    assert run(monkeypatch, tmp_path, timed, grown(timed, row.name, 1.1), "--fail-above", "5%") == 0
    assert "noise?" in capsys.readouterr().out


def test_what_is_on_its_way_to_a_tier_is_no_growth(timed: Result) -> None:
    for row in timed.rows:
        row.policy = row.name if row.kind == "ours" else ""

    def complaints(name: str) -> list[str]:
        change = next(c for c in changes(timed, grown(timed, name, held=3)) if c.new.name == name)
        return list(change.complaints(0.05))

    assert complaints("recompute(raw @ disk)") == []  # 3 MiB more or less of 200 that are saved
    assert complaints("recompute") == ["holds 200.0 % more"]
    assert complaints("int8 @ host") == ["holds 200.0 % more"]  # 104 MiB are more than can be on their way


def test_a_row_that_fails_or_is_not_exact_any_more_is_worse(timed: Result) -> None:
    new = grown(timed, "recompute")
    new.rows[2].bit_equal, new.rows[2].grad_error = False, 0.01
    new.rows[3].failed = "OSError: no"
    worse = {change.new.name: change.worse for change in changes(timed, new) if change.worse}
    assert worse == {
        "raw @ host": "was exact, and has a gradient error of 1.00e-02",
        "int8": "fails now: OSError: no",
    }


def test_unlike_results_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timed: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    new = grown(timed, "int8")
    new.environment |= {"cores": 64, "time": "later", "numba": "1"}
    new.workload |= {"width": 48, "steps": 99}
    assert run(monkeypatch, tmp_path, timed, new) == 2
    said = capsys.readouterr().err
    assert "cores 2 and 64; workload: width 32 and 48. Measure both alike, or give --anyway" in said
    assert "steps" not in said
    assert run(monkeypatch, tmp_path, timed, new, "--anyway", "--fail-above", "5%") == 0
    said = capsys.readouterr().out
    assert "unlike: cores 2 and 64" in said
    assert "versions, old and new: numba None and 1" in said


def test_a_result_without_a_model_is_of_the_first_one(timed: Result) -> None:
    old = replace(timed, workload={name: value for name, value in timed.workload.items() if name != "model"})
    assert differences(old, timed) == []
    assert packages(old, timed) == []


def test_rows_of_one_result_only_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timed: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    new = grown(timed, "int8")
    new.rows[1].name = "another peer"
    assert run(monkeypatch, tmp_path, timed, new, "--fail-above", "5%") == 0
    said = capsys.readouterr().out
    assert "a peer is in the old result only" in said
    assert "another peer is in the new result only" in said
    assert max(map(len, said.splitlines())) <= TABLE_WIDTH
    assert "…" not in said


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), (" 12.5 % ", 0.125), ("0", 0.0), ("", None)])
def test_limits(text: str, value: float | None) -> None:
    assert compare.parse_limit(text) == value


@pytest.mark.parametrize("text", ["five", "-1%", "nan", "inf", "5%%"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a share >= 0"):
        compare.parse_limit(text)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 1}', "no JSON"])
def test_what_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="not a result of the benchmark"):
        compare.read(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="No such file"):
        compare.read(tmp_path / "y.json")
