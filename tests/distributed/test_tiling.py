"""Tiles beside DDP and FSDP2."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.launch import check_jobs

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

JOBS = [f"tests.distributed.tiling:{name}" for name in ("ddp", "fsdp", "fsdp_of_parts")]


def test_gradients_in_tiles_are_those_without(tmp_path: Path) -> None:
    check_jobs(2, JOBS, tmp_path, 240)
