"""Fits of one rank are what that rank has in training."""

from pathlib import Path

import pytest
import torch.distributed as dist

from actstore.devices import cpu_memory
from tests.distributed.launch import check_jobs

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here"),
]

JOBS = ["tests.distributed.fitting:fsdp", "tests.distributed.fitting:tensor_parallel"]


def test_two_ranks_have_the_bytes_of_a_fit(tmp_path: Path) -> None:
    check_jobs(2, JOBS, tmp_path, 120)
