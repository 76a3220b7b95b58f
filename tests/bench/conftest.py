"""A workload that takes milliseconds."""

from __future__ import annotations

import pytest

from actstore.bench.result import Result, RowResult
from actstore.bench.workloads.workload import Workload

TINY = Workload(layers=2, width=32, heads=2, context=16, batch=2, steps=2, warmup=1, threads=1)
MIB = 2**20


@pytest.fixture
def tiny() -> Workload:
    return TINY


@pytest.fixture
def result() -> Result:
    """Figures made up for the tests of table, picture and JSON."""
    environment = {"processor": "a processor", "gpu": None, "cores": 2, "torch": "2"}
    made_up = (
        ("plain", "plain", 1.0, 200, 0.0),
        ("a peer", "peer", 1.01, 200, 0.0),
        ("raw @ host", "ours", 1.02, 199, 0.0),
        ("int8", "ours", 1.1, 52, 0.02),
        ("int8 @ host", "ours", 1.11, 52, 0.02),
        ("recompute(raw @ disk)", "ours", 1.3, 3, 0.0),
        ("recompute(int8)", "ours", 1.31, 4, 0.01),
        ("recompute", "ours", 1.29, 9, 0.0),
    )
    rows = [
        RowResult(
            name, kind, step_ms=600 * ratio, ratio=ratio, saved_bytes=200 * MIB, held_bytes=held * MIB,
            peak_bytes=600 * MIB, loss=3.0, loss_hex=(3.0).hex(), grad_error=error, bit_equal=error == 0,
        )
        for name, kind, ratio, held, error in made_up
    ]  # fmt: skip
    rows.append(RowResult("raw @ disk", "ours", failed="OSError: the disk is full"))
    left_out = [{"name": "bitsandbytes 8-bit", "reason": "bitsandbytes is not installed"}]
    return Result(environment, TINY.to_dict(), rows, left_out)
