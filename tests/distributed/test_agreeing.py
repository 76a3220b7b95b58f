"""Ranks of a group run one plan, or each the plan that it had; none waits for ever. So do ranks that resume."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import launch
from tests.distributed.agreeing import is_killed

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

JOBS = [
    "one_seed",
    "tensor_parallel_that_measures",
    "ranks_with_other_models_plan_by_themselves",
    "a_plan_changes_on_all_ranks_at_once",
    "a_plan_stays_where_a_rank_is_late",
    "a_rank_that_skips_a_step_is_named",
    "the_leader_that_fails_is_named_with_its_error",
    "a_budget_that_is_too_small_is_refused_on_all_ranks",
    "a_report_has_all_ranks",
    "a_group_is_checked",
    "resuming:a_checkpoint_has_the_stores_of_all_ranks",
    "resuming:a_group_runs_its_plan_at_once",
    "resuming:a_rank_with_another_state_is_named",
    "resuming:a_restart_finds_no_values_of_the_ranks_before",
]
SLOW_JOBS = [
    "tensor_parallel_with_a_plan",
    "a_failed_step_is_measured_again",
    "evaluations_count_for_no_rank",
    "resuming:other_groups_and_budgets_measure_again",
]


def check(world: int, names: list[str], folder: Path) -> None:
    names = [f"tests.distributed.{name if ':' in name else f'agreeing:{name}'}" for name in names]
    launch.check_jobs(world, names, folder, 240)


def test_two_ranks(tmp_path: Path) -> None:
    check(2, JOBS, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_jobs_of_all_kinds(world: int, tmp_path: Path) -> None:
    check(world, [*SLOW_JOBS, *JOBS[1:]], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_a_hundred_seeds(first: int, world: int, tmp_path: Path) -> None:
    check(world, [f"agreeing:seeds:{first}"], tmp_path)


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    ranks = launch.start(is_killed, (str(tmp_path),), 2)
    for process in ranks.processes:
        process.join(120)
    assert [process.exitcode for process in ranks.processes] == [0, -signal.SIGKILL]
    assert re.search(r"step [23]: nothing came from rank 1, ", (tmp_path / "raised").read_text())
