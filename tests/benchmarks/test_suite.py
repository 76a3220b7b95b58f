"""The long run, cut short: what it keeps when it is interrupted, and that a quick one goes through."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actstore.bench.peers.rows import ROWS, Row
from actstore.bench.result import Duel, Result
from actstore.bench.workloads import MODELS, sized
from actstore.bench.workloads.workload import Workload
from actstore.errors import ConfigError
from actstore.trace import Event
from benchmarks import largest, machine
from benchmarks.suite import breakdown, convergence, long, page, scaling
from benchmarks.suite import run as suite
from tests.bench.legible import faults

MS = 1_000_000


def test_every_workload_is_a_part() -> None:
    for quick in (False, True):
        names = [part.name for part in suite.parts(quick, [])]
        assert names == [*MODELS, *page.SECTIONS]
    assert sum(part.minutes for part in suite.parts(False, [])) < 125


def test_the_rows_of_all_parts_exist() -> None:
    known = {row.name for row in ROWS}
    for part in (scaling, largest, convergence):
        assert set(part.ROWS) <= known


def test_rows_of_long_contexts_compute_the_same(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Each loss is that of the whole; its peak, at a size where logits are most of it, is lower in slices."""
    monkeypatch.setattr(long, "find_spec", lambda _: None)  # TRL takes seconds to import
    works = [sized(model, layers=1, width=16, heads=4, context=256, batch=1) for model in long.MODELS]
    found: list[dict[str, Any]] = []
    long.measure(works, 4096, 1, found.append)
    assert len(found) == 2
    for run in found[-1]["runs"]:
        rows = {row["name"]: row for row in run["rows"]}
        assert {"plain", long.BASE, long.OURS, "torch checkpoint"} <= rows.keys()
        assert all(row["gradient_error"] < 1e-5 for row in rows.values())
        assert all(row["loss_error"] < 1e-6 for name, row in rows.items() if name != "plain")
        assert rows[long.OURS]["peak"] < 0.35
        assert rows["plain"]["peak_bytes"] >= rows[long.BASE]["peak_bytes"]
    assert sum(long.OURS in line for line in long.lines(found[-1])) == 2
    assert faults(long.draw(found[-1])) == []


@pytest.mark.parametrize(
    ("error", "said"), [(KeyboardInterrupt(), "interrupted"), (OSError("no room"), "OSError: no room")]
)
def test_a_part_that_ends_early_keeps_what_it_has(
    tmp_path: Path, result: Result, error: BaseException, said: str
) -> None:
    def run(write: Callable[[dict[str, Any]], None]) -> None:
        write(result.to_dict())
        raise error

    folder = tmp_path / "m"
    folder.mkdir()
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            suite.run_part(suite.Part("gpt", run, 1), folder)
    else:
        assert suite.run_part(suite.Part("gpt", run, 1), folder) == said
    assert f"**Not finished**: {said}" in (tmp_path / "m.md").read_text()
    assert machine.read(folder / "gpt.json")["rows"]


def test_rows_that_are_measured_later_stand_beside_the_others(result: Result) -> None:
    rows = [replace(result.rows[0], ratio=9.0), replace(result.rows[3], ratio=1.2), replace(result.rows[3], name="new")]
    found = Result.from_dict(suite.merged(result.to_dict(), replace(result, rows=rows).to_dict()))
    assert [row.name for row in found.rows] == [*(row.name for row in result.rows), "new"]
    assert [found.rows[i].ratio for i in (0, 1, 3)] == [1.0, 1.01, 1.2]
    other = replace(result, environment=result.environment | {"torch": "3"})
    with pytest.raises(ConfigError, match=r"torch 2 and 3\. Measure all of them, without --rows"):
        suite.merged(result.to_dict(), other.to_dict())


def test_duels_of_rows_that_are_measured_later_are_fought_again(
    tmp_path: Path, result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(names: list[str], **how: Any) -> list[tuple[str, str]]:
        fought: list[tuple[str, str]] = []

        def duel(work: Workload, peer: Row, ours: Row) -> Duel:
            fought.append((peer.name, ours.name))
            return Duel(peer.name, ours.name, [10.0] * 2, [float(len(names))] * 2)

        monkeypatch.setattr(suite.runner, "duel", duel)
        part = {part.name: part for part in suite.parts(quick=True, names=names)}["gpt"]
        part = replace(part, run=lambda write: write(result.to_dict()))
        assert not suite.run_part(part, tmp_path / "m", **how)
        return fought

    monkeypatch.setattr(page.plot, "save", lambda *_: None)  # takes most of the time
    result.rows[1].name, result.rows[2].name = "torch checkpoint", "keep"
    result.rows.append(replace(result.rows[1], name="save_on_cpu"))
    both = [("torch checkpoint", "keep"), ("save_on_cpu", "keep")]
    (tmp_path / "m").mkdir()
    assert run([]) == both
    assert run([], duels_only=True) == both
    assert run(["torch checkpoint"], some=True) == both[:1]
    assert run(["keep"], duels_only=True, some=True) == both
    assert run(["int8"], some=True) == []
    duels = Result.from_dict(machine.read(tmp_path / "m" / "gpt.json")).duels
    assert [(one.peer, one.ours, one.ours_ms) for one in duels] == [(*pair, [1.0] * 2) for pair in both]
    assert "a peer and ours trained in turns for it, at least 2 steps each." in (tmp_path / "m.md").read_text()


def test_duels_need_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["suite", "--quick", "--output", str(tmp_path), "--part", "vit", "--duels"])
    assert suite.main() == 1
    assert "vit failed: ConfigError: vit has no rows in " in capsys.readouterr().err
    assert not list(tmp_path.glob("*/parts.json"))
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-2], "scaling", "--duels"])
    with pytest.raises(SystemExit):
        suite.main()
    assert "no part is called 'scaling'; there are gpt, " in capsys.readouterr().err


def test_a_quick_run_goes_through(tmp_path: Path) -> None:
    """Of one part in processes and one without."""
    command = [sys.executable, "-m", "benchmarks.suite.run", "--quick", "--output", str(tmp_path)]
    command += ["--rows", "int8", "--part", "resnet", "--part", "breakdown"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(suite.__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    (text,) = [path.read_text() for path in tmp_path.glob("*.md")]
    assert "| int8 |" in text
    assert "| recompute(raw @ disk) |" in text
    assert "Not finished" not in text


def test_scaling_takes_each_size_once(monkeypatch: pytest.MonkeyPatch, result: Result, tiny: Workload) -> None:
    seen: list[Workload] = []
    monkeypatch.setattr(scaling.runner, "run", lambda work, rows: seen.append(work) or result)
    written: list[int] = []
    scaling.measure(tiny, {"layers": [1, 2], "batch": [3]}, [], lambda found: written.append(len(found["points"])))
    assert [(work.layers, work.batch) for work in seen] == [(1, 2), (2, 2), (2, 3)]
    assert written == [1, 2, 3]


@pytest.mark.parametrize(
    ("peak", "limit", "most", "batch"),
    [
        (lambda b: 100 * b, 1000, 512, 10),
        (lambda b: 100 * b + 50, 1000, 512, 9),
        (lambda b: 70 * b if b < 4 else 300 + 10 * b, 1000, 512, 70),
        (lambda b: 5 * b * b, 1000, 512, 14),
        (lambda b: 2000, 1000, 512, 0),
        (lambda b: 0, 1000, 64, 64),
        (lambda b: 100 * b, 100, 512, 1),
        (lambda b: 40 * b + 3 * (b % 5), 1000, 10, 10),
    ],
)
def test_the_largest_batch_is_found(peak: Callable[[int], int], limit: int, most: int, batch: int) -> None:
    found, tried = largest.largest(lambda size: peak(size) if peak(size) <= limit else None, limit, most)
    assert found == batch
    assert len(tried) <= 18
    assert found == 0 or tried[found] is not None
    assert found == most or tried[found + 1] is None


def test_a_process_that_needs_more_than_its_limit_does_not_train(tiny: Workload) -> None:
    """By the kernel, not by accounts of ours: Python and PyTorch alone need more than the small limit."""
    for limit, fits in ((100 * 2**20, False), (2**33, True)):
        with largest.control_group(limit) as group:
            for limited_by in {group, None}:  # as well as by RLIMIT_DATA
                peak = largest._peak(tiny, ROWS[0], 2, limit, limited_by)
                assert (peak is not None) == fits
                assert peak is None or 100 * 2**20 < peak < limit
        assert group is None or not group.exists()


def test_the_largest_batch_of_each_row(monkeypatch: pytest.MonkeyPatch, tiny: Workload) -> None:
    sizes = {"plain": 100, "recompute": 30}
    monkeypatch.setattr(
        largest, "_peak", lambda _work, row, batch, limit, _: b if (b := sizes[row.name] * batch) <= limit else None
    )
    written: list[dict[str, Any]] = []
    largest.measure(tiny, 600, 64, [row for row in ROWS if row.name in sizes], written.append)
    assert [(row["name"], row["batch"], row["lossy"]) for row in written[-1]["rows"]] == [
        ("plain", 6, False),
        ("recompute", 20, False),
    ]


def test_parts_of_a_step_add_up_to_it() -> None:
    events = [
        Event("recompute", 40 * MS, 60 * MS),
        Event("decode", 45 * MS, 50 * MS),
        Event("stall", 48 * MS, 52 * MS),
        Event("encode", -5 * MS, 10 * MS),
        Event("offload", 0, 90 * MS),
    ]
    found = breakdown.parts_of(events, 0, 100 * MS)
    assert found == {"stall": 4.0, "decode": 3.0, "encode": 10.0, "recompute": 13.0, breakdown.REST: 70.0}


@pytest.mark.usefixtures("one_thread")
def test_a_step_is_measured_under_every_policy(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "POLICIES", ("recompute", "int8"))
    written: list[dict[str, Any]] = []
    breakdown.measure(tiny, 2, written.append)
    plain, recompute, _ = written[-1]["rows"]
    assert plain["recompute"] == 0
    assert recompute["recompute"] > 0
    assert recompute[breakdown.REST] > 0
