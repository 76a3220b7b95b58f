"""Stages of a pipeline keep a budget by plans of their own: with more micro-batches in flight each keeps less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from actstore.devices import cpu_memory
from tests.distributed.launch import RUNS_ZERO_BUBBLE_V, check_jobs

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here"),
]

SLOW = ["gpipe", "one_forward_one_backward", "interleaved", "zero_bubble"]
SLOW += ["zero_bubble_v"] if RUNS_ZERO_BUBBLE_V else []


def test_two_stages(tmp_path: Path) -> None:
    check_jobs(2, ["tests.distributed.stages:one_forward_one_backward"], tmp_path, 120)


@pytest.mark.slow
@pytest.mark.parametrize("job", SLOW)
@pytest.mark.parametrize("world", [2, 4])
def test_stages_by_all_schedules(world: int, job: str, tmp_path: Path) -> None:
    check_jobs(world, [f"tests.distributed.stages:{job}"], tmp_path, 240)
