"""Models that call collectives inside of recomputed blocks: bits and collectives are those of plain training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.launch import check_jobs

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

EXPERTS = [
    f"tests.distributed.experts:{name}"
    for name in ("experts_are_exact", "experts_exchange_as_often", "experts_with_a_loss", "no_token_is_rerouted")
]
CONTEXT = [
    f"tests.distributed.context:{name}"
    for name in (
        "parts_of_tokens_are_those_of_one_process",
        "parts_of_tokens_are_exact",
        "parts_of_tokens_are_exchanged_as_often",
    )
]
RULED = [
    f"tests.distributed.collectives:{name}"
    for name in (
        "collectives_run_once",
        "ranks_may_recompute_other_blocks",
        "a_stored_result_is_summed_in_place",
        "sums_in_buffers_are_counted_once",
        "collectives_overlap",
        "callers_may_wait_for_collectives",
    )
]
MESSAGES = [
    f"tests.distributed.messages:{name}"
    for name in (
        "messages_are_sent_once",
        "messages_run_again_without_the_rule",
        "a_rank_may_recompute_alone",
        "what_cannot_come_back_is_refused",
    )
]
SLOW = [
    f"tests.distributed.collectives:{name}"
    for name in (
        "collectives_are_exact", "collectives_with_a_loss", "weights_are_gathered_again", "tensor_parallel_layers",
    )
]  # fmt: skip


@pytest.mark.more
def test_two_ranks(tmp_path: Path) -> None:
    check_jobs(2, [*EXPERTS, *RULED, *MESSAGES, CONTEXT[-1]], tmp_path, 270)


@pytest.mark.slow
def test_two_ranks_by_all_rules(tmp_path: Path) -> None:
    check_jobs(2, [*CONTEXT, *SLOW], tmp_path, 270)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks(tmp_path: Path) -> None:
    check_jobs(4, [*EXPERTS, *RULED, *MESSAGES, *CONTEXT, *SLOW], tmp_path, 540)
