"""Models that call collectives inside of recomputed blocks: bits and collectives are those of plain training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.launch import launch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

JOBS = [
    f"tests.distributed.experts:{name}"
    for name in ("experts_are_exact", "experts_exchange_as_often", "experts_with_a_loss", "no_token_is_rerouted")
]


def check(world: int, folder: Path, timeout_s: float) -> None:
    outcome = launch(world, JOBS, folder, timeout_s)
    failures = [f"{name}\n{text}" for name in JOBS for text in outcome.failures[name]]
    assert not failures, "\n\n".join(failures)


def test_two_ranks(tmp_path: Path) -> None:
    check(2, tmp_path, 270)
