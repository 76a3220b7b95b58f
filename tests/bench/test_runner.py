"""Rows in processes of their own, and what happens when one dies."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Self

import pytest

from actstore.bench import runner
from actstore.bench.peers import rows
from actstore.bench.peers.rows import BITSANDBYTES, PLAIN, Row
from actstore.bench.result import Duel, Result
from actstore.bench.runner import Client, RowFailed, RowLeftOut, run, steps_of
from actstore.bench.workloads.workload import Workload


def test_a_row_that_fails_leaves_the_others_alone(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "find_spec", lambda name: None)
    bad = Row("bad", "ours", "blocks.*.nothing : int8")
    good = Row("mine", "ours", "raw @ host")
    chosen, seen, done = [PLAIN, BITSANDBYTES, bad, good], [], []
    result = run(tiny, chosen, progress=seen.append, row_done=lambda so_far: done.append(len(so_far.rows)))
    assert [row.name for row in result.rows] == ["plain", "bad", "mine"]
    assert result.left_out == [{"name": "bitsandbytes 8-bit", "reason": "bitsandbytes is not installed"}]
    plain, failed, mine = result.rows
    assert "PolicyError" in failed.failed
    assert "nothing" in failed.failed
    assert failed.step_ms is None
    assert not plain.failed
    assert not mine.failed
    assert mine.loss_hex == plain.loss_hex
    assert mine.grad_error == plain.grad_error == 0.0
    assert plain.ratio == 1.0
    assert len(mine.step_samples_ms) == len(mine.plain_samples_ms) == tiny.steps
    assert mine.peak_bytes is not None
    assert mine.baseline_bytes is not None
    assert mine.peak_bytes > mine.baseline_bytes > 0
    assert seen == ["plain"] * 2 + ["mine"] * 2
    assert steps_of(tiny, chosen) == 3 * tiny.steps
    assert done == [2, 3]
    assert Result.from_json(result.to_json()) == result


def test_a_killed_process_is_a_failed_row(tiny: Workload) -> None:
    with Client(tiny, PLAIN, None) as client:
        client._process.kill()
        with pytest.raises(RowFailed, match="SIGKILL"):
            client.start()


def test_a_silent_process_is_a_failed_row(tiny: Workload) -> None:
    with Client(tiny, PLAIN, None, limit_s=0.01) as client, pytest.raises(RowFailed, match="no answer to 'start'"):
        client.start()


class FakeClient:
    """Answers at once: plain takes 10 ms, a row twice that, in its second process three times."""

    started: ClassVar[list[str]] = []

    def __init__(self, work: Workload, row: Row, disk_path: str | None) -> None:
        self.name = row.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def start(self) -> list[float]:
        self.started.append(self.name)
        if self.name == "meaningless":
            raise RowLeftOut("it has no blocks")
        if self.name == "fragile" and self.started.count(self.name) == 2:
            raise RowFailed("gone")
        return [1.0]

    def step(self) -> tuple[float, float]:
        return (10.0 if self.name == "plain" else 10.0 * (1 + self.started.count(self.name))), 0.5

    def ask(self, do: str) -> dict[str, object]:
        return {}


def test_repeats_are_new_processes_in_a_new_order(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClient, "started", [])
    monkeypatch.setattr(runner, "Client", FakeClient)
    names = ["a", "b", "meaningless", "fragile", "c"]
    chosen = [PLAIN, *(Row(name, "ours", "keep") for name in names)]
    seen: list[str] = []
    result = run(tiny, chosen, progress=seen.append, repeats=3)
    assert result.left_out == [{"name": "meaningless", "reason": "it has no blocks"}]
    assert [row.name for row in result.rows] == ["plain", "a", "b", "fragile", "c"]
    assert [row.failed for row in result.rows] == ["", "", "", "in repeat 2: gone", ""]
    started = FakeClient.started
    assert started[:6] == ["plain", *names]
    assert sorted(started[6:10]) == ["a", "b", "c", "fragile"]
    assert sorted(started[10:]) == ["a", "b", "c"]
    assert started[6:] != [name for name in names if name in started[6:]]
    found = result.rows[1]
    assert found.repeat_ratios == [2.0, 3.0, 4.0]
    assert found.ratio == 3.0
    assert len(found.step_samples_ms) == len(found.plain_samples_ms) == 3 * tiny.steps
    assert found.losses == [1.0, 0.5, 0.5]
    assert len(seen) == steps_of(tiny, [PLAIN, *chosen[1:3], chosen[5]], 3) + tiny.steps  # and one repeat of "fragile"


def test_a_duel_trains_two_rows_in_turns(tiny: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Ordered(FakeClient):
        def step(self) -> tuple[float, float]:
            order.append(self.name)
            return {"theirs": 10.0, "mine": 12.0}[self.name], 0.5

    monkeypatch.setattr(FakeClient, "started", [])
    monkeypatch.setattr(runner, "Client", Ordered)
    work = replace(tiny, steps=3)
    found = runner.duel(work, Row("theirs", "peer"), Row("mine", "ours", "keep"))
    assert found == Duel("theirs", "mine", [10.0] * 3, [12.0] * 3)
    assert found.pairs == [1.2] * 3
    assert FakeClient.started == ["theirs", "mine"]
    assert order == ["mine", "theirs", "theirs", "mine", "mine", "theirs"]
    result = Result({}, tiny.to_dict(), duels=[found])
    assert Result.from_json(result.to_json()) == result
    order.clear()
    rows = [Row("theirs", "peer"), Row("mine", "ours", "keep")]
    assert runner.fastest(work, rows) == rows[0]
    assert len(order) == 2 * runner.HEAT_STEPS
    assert runner.fastest(work, rows[1:]) == rows[1]
    assert len(order) == 2 * runner.HEAT_STEPS  # of one row nothing runs
