"""Ranks that stop and go on: with torch.distributed.checkpoint, and with the plan of a group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.launch import launch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

JOBS = [
    "a_checkpoint_has_the_stores_of_all_ranks",
    "a_group_runs_its_plan_at_once",
    "a_rank_with_another_state_is_named",
    "other_groups_and_budgets_measure_again",
    "a_restart_finds_no_values_of_the_ranks_before",
]


def test_two_ranks(tmp_path: Path) -> None:
    names = [f"tests.distributed.resuming:{name}" for name in JOBS]
    outcome = launch(2, names, tmp_path, 240)
    failures = [f"{name}\n{text}" for name in names for text in outcome.failures[name]]
    assert not failures, "\n\n".join(failures)
    assert outcome.end == ""
