"""Training on several gloo processes is, under a store, what it is without one: bit for bit, and nothing is left.

One test for all jobs: each start of the processes costs seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.launch import RUNS_ZERO_BUBBLE_V, launch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

JOBS = [
    *("ddp", "ddp_no_sync_dropout", "ddp_budgets", "ddp_one_rank_fails"),
    *("fsdp_reshard", "fsdp_no_reshard", "fsdp_bf16_accumulation_dropout"),
    *("tensor_parallel", "sequence_parallel"),
    *("pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved", "pipeline_zero_bubble"),
    *(["pipeline_zero_bubble_v"] if RUNS_ZERO_BUBBLE_V else []),
]


def check(world: int, names: list[str], folder: Path, timeout_s: float) -> None:
    """Run the jobs, and last one that a rank leaves by an exception: it ends at once, whatever is on its way."""
    names = [f"tests.distributed.jobs:{name}" for name in (*names, "one_rank_leaves")]
    outcome = launch(world, names, folder, timeout_s, "spawn")  # whose ranks end as a program does
    failures = [f"{name}\n{text}" for name in names[:-1] for text in outcome.failures[name]]
    assert not failures, "\n\n".join(failures)
    assert outcome.end == f"process {world - 1} terminated with exit code 1", outcome


@pytest.mark.more
def test_two_ranks(tmp_path: Path) -> None:
    check(2, JOBS, tmp_path, 270)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    check(4, [*JOBS, "sharded_tensor_parallel"], tmp_path, 840)
