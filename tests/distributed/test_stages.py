"""Stages of a pipeline keep a budget by plans of their own: with more micro-batches in flight each keeps less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from actstore.devices import cpu_memory
from tests.distributed.launch import launch

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here"),
]

SLOW = ["gpipe", "one_forward_one_backward", "interleaved", "zero_bubble", "zero_bubble_v"]


def check(world: int, jobs: list[str], folder: Path, timeout_s: float) -> None:
    names = [f"tests.distributed.stages:{name}" for name in jobs]
    outcome = launch(world, names, folder, timeout_s)
    failures = [f"{name}\n{text}" for name in names for text in outcome.failures[name]]
    assert not failures, "\n\n".join(failures)
    assert outcome.end == ""


def test_two_stages(tmp_path: Path) -> None:
    check(2, ["one_forward_one_backward"], tmp_path, 120)


@pytest.mark.slow
@pytest.mark.parametrize("job", SLOW)
@pytest.mark.parametrize("world", [2, 4])
def test_stages_by_all_schedules(world: int, job: str, tmp_path: Path) -> None:
    check(world, [job], tmp_path, 240)
