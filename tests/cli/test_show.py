"""The command `actstore show`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actstore.bench.result import Result
from actstore.cli import commands
from actstore.cli.app import main
from actstore.trace import Trace

MS = 1_000_000


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Of 15 steps; step n stalls n milliseconds."""
    trace = Trace(device="cpu")
    for step in range(15):
        zero = step * 200 * MS
        trace.add("forward", zero, zero + 40 * MS, step=step)
        trace.add("offload", zero + 10 * MS, zero + 30 * MS, "a[0]", step, "disk", 50 * MS)
        trace.add("keep", zero + 5, zero + 5, "b[0]", step, "", 2**20, "no room")
        trace.add("fetch", zero + 30 * MS, zero + 70 * MS, "a[0]", step, "disk", 50 * MS)
        trace.add("stall", zero + 40 * MS, zero + (40 + step) * MS, "a[0]", step, "disk")
        trace.add("backward", zero + 40 * MS, zero + 100 * MS, step=step)
    path = tmp_path / "t.ndjson"
    trace.write(path)
    return path


def show(*arguments: object) -> str:
    done = CliRunner().invoke(commands.app, ["show", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["actstore", "show", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("actstore: ")
    return said


def row(said: str, name: str) -> list[str]:
    return next(line.split() for line in said.splitlines() if line.split()[: len(name.split())] == name.split())


def test_shows_the_last_step_and_a_table_of_steps(trace: Path) -> None:
    said = show(trace)
    assert "step 14 on cpu: copies hidden: 77 %, stall 14.0 ms of 100.0 ms" in said
    assert row(said, "compute") == ["compute", "3", "-", "86.00", "86.0", "-", "-", "-"]
    assert row(said, "fetch disk") == ["fetch", "disk", "1", "47.7", "MiB", "40.00", "40.0", "1.25", "65", "%", "14.00"]
    assert "steps of 15, the last 12" in said
    assert row(said, "3")[:6] == ["3", "100.00", "97.00", "3.00", "1", "95"]
    assert row(said, "14")[-6:] == ["47.7", "MiB", "47.7", "MiB", "1.0", "MiB"]
    assert max(map(len, said.splitlines())) <= 100


def test_shows_the_step_asked_for_and_writes_files(trace: Path, tmp_path: Path) -> None:
    said = show(trace, "--step", 2, "--plot", tmp_path / "t.png", "--chrome", tmp_path / "t.json")
    assert "step 2 on cpu: copies hidden: 97 %, stall 2.0 ms of 100.0 ms" in said
    assert (tmp_path / "t.png").stat().st_size > 5000
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) > 15 * 6


def test_says_when_events_were_lost(tmp_path: Path) -> None:
    trace = Trace(limit=1)
    for _ in range(3):
        trace.add("stall", 0, MS)
    trace.write(tmp_path / "t.ndjson")
    assert "2 older events were lost" in show(tmp_path / "t.ndjson")


def test_shows_a_trace_without_events(tmp_path: Path) -> None:
    Trace().write(tmp_path / "t.ndjson")
    assert "no events" in show(tmp_path / "t.ndjson", "--plot", tmp_path / "t.png")


def test_shows_results_of_benchmarks(result: Result, tmp_path: Path) -> None:
    result.write(tmp_path / "r.json")
    assert "held" in show(tmp_path / "r.json", "--plot", tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 5000
    codecs = Path(__file__).parents[2] / "benchmarks" / "results" / "intel-xeon-2-cores" / "codecs.json"
    assert "int8(affine)" in show(codecs)


def test_other_files_are_refused_in_a_line(
    trace: Path, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: object) -> str:
        return refusal(monkeypatch, capsys, *arguments)

    result.write(tmp_path / "r.json")
    for number, content in enumerate((b"", b"{}", b"[1]", b"hello", b"\xff\x00", b"[" * 100_000, b'{"rows": [1]}')):
        file = tmp_path / f"{number}.json"
        file.write_bytes(content)
        assert f"{number}.json is neither a trace nor a result of a benchmark" in said(file)
    assert "No such file or directory" in said(tmp_path / "none")
    assert "--step 99 is not in the trace, which has steps 0 to 14" in said(trace, "--step", 99)
    assert "--chrome does nothing to" in said(tmp_path / "r.json", "--chrome", tmp_path / "c.json")
    assert "--step does nothing to" in said(tmp_path / "r.json", "--step", 0)
    assert "is the file to show" in said(trace, "--chrome", trace)
    assert "--plot x.gif: give a file that ends in" in said(trace, "--plot", "x.gif")
    cut = tmp_path / "cut.ndjson"
    cut.write_text("\n".join(trace.read_text().splitlines()[:4]) + "\n")
    assert "cut.ndjson, line 4: the first line promises 90 events and 3 follow" in said(cut)
    assert len(Trace.read(trace)) == 90
