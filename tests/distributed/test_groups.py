"""Ranks that store equal tensors once: the same gradients, one slice each, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from time import sleep

import pytest
import torch.distributed as dist

from tests.distributed.groups import loses_a_rank
from tests.distributed.launch import check_jobs, start

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

JOBS = [
    f"tests.distributed.groups:{name}"
    for name in (
        "group_is_exact",
        "group_holds_a_slice",
        "other_tensors_are_refused",
        "ranks_read_in_their_own_order",
    )
]


def test_two_ranks(tmp_path: Path) -> None:
    check_jobs(2, JOBS, tmp_path, 120)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check_jobs(4, [*JOBS, "tests.distributed.groups:llama"], tmp_path, 480)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "wait_s", "text"),
    [
        ([signal.SIGKILL], 20.0, "rank 1 no longer answers"),
        ([signal.SIGSTOP], 3.0, r"rank 1 has not answered in 3.0 s: its process is stopped, .* Look at rank 1"),
        ([signal.SIGSTOP, signal.SIGKILL], 60.0, "rank 1 no longer answers"),  # while its slice is gathered
    ],
)
def test_a_lost_rank_is_named(signals: list[signal.Signals], wait_s: float, text: str, tmp_path: Path) -> None:
    ranks = start(loses_a_rank, (str(tmp_path), wait_s), 2)
    first, second = ranks.processes
    try:
        while not all((tmp_path / f"landed.{rank}").exists() for rank in range(2)):
            assert first.is_alive()
            assert second.is_alive()
            sleep(0.01)
        os.kill(second.pid, signals[0])
        if signals[0] is signal.SIGKILL:
            second.join(60)
        (tmp_path / "lost").touch()
        for later in signals[1:]:
            while not (tmp_path / "asked").exists():
                assert first.is_alive()
                sleep(0.01)
            os.kill(second.pid, later)
        first.join(60)
        assert first.exitcode == 0
    finally:
        for process in (first, second):
            process.kill()
            process.join()
    assert re.match(rf"1 \[\] while decoding blocks\.1\[0\] .*: {text}", (tmp_path / "raised").read_text())
