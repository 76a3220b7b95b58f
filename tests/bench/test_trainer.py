"""One row in this process: its steps, its gradients, its bytes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from actstore.bench.peers.rows import ROWS, Row
from actstore.bench.trainer import Trainer, relative_error
from actstore.bench.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")  # a trainer sets the number of threads of its process

BY_NAME = {row.name: row for row in ROWS}


def train(work: Workload, row: Row, steps: int = 2) -> float:
    trainer = Trainer(work, row, None)
    trainer.start()
    loss = math.nan
    for _ in range(steps):
        elapsed_ms, loss = trainer.step()
        assert elapsed_ms > 0
    peaks = trainer.peaks()
    assert peaks["peak_bytes"] > 0
    assert peaks["baseline_bytes"] > 0
    assert peaks["libraries_bytes"] is not None
    trainer.close()
    return loss


def test_the_same_seed_gives_the_same_loss_to_every_lossless_row(tiny: Workload) -> None:
    work = dataclasses.replace(tiny, dropout=0.1)
    expected = train(work, BY_NAME["plain"])
    assert math.isfinite(expected)
    for name in ("plain", "torch checkpoint", "save_on_cpu", "raw @ host", "recompute"):
        assert train(work, BY_NAME[name]) == expected, name
    assert train(dataclasses.replace(work, seed=1), BY_NAME["plain"]) != expected


@pytest.mark.parametrize("name", ["raw @ host", "raw @ disk", "recompute"])
def test_lossless_rows_have_plain_gradients(tiny: Workload, name: str) -> None:
    found = Trainer(tiny, BY_NAME[name], None).check()
    assert found["grad_error"] == 0.0
    assert found["bit_equal"]
    assert found["held_bytes"] > 0


def test_a_lossy_peer_has_an_error_and_holds_less(tiny: Workload) -> None:
    pytest.importorskip("bitsandbytes")
    work = dataclasses.replace(tiny, width=128, context=64)
    found = Trainer(work, BY_NAME["bitsandbytes 8-bit"], None).check()
    assert 0 < found["grad_error"] < 0.1
    assert not found["bit_equal"]
    assert found["held_bytes"] < 0.6 * found["saved_bytes"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_trains(tiny: Workload, dtype: str) -> None:
    work = dataclasses.replace(tiny, dtype=dtype)
    assert math.isfinite(train(work, BY_NAME["plain"]))
    assert Trainer(work, BY_NAME["raw @ host"], None).check()["bit_equal"]


def test_relative_error() -> None:
    one = [torch.ones(4)]
    assert relative_error(one, one) == 0.0
    assert relative_error([torch.full((4,), 1.5)], one) == pytest.approx(0.5)
    assert relative_error(one, [torch.zeros(4)]) == math.inf
    assert math.isnan(relative_error([torch.full((4,), math.nan)], one))
