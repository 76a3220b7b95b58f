"""Rows in processes of their own, and what happens when one dies."""

from __future__ import annotations

import pytest

from actstore.bench import rows
from actstore.bench.client import Client, RowFailed
from actstore.bench.result import Result
from actstore.bench.rows import BITSANDBYTES, PLAIN, Row
from actstore.bench.runner import run, steps_of
from actstore.bench.workload import Workload


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
