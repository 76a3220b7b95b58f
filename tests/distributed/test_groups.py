"""Ranks that store equal tensors once: the same gradients, one slice each, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.launch import launch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")

JOBS = ["group_is_exact", "group_holds_a_slice", "other_tensors_are_refused"]


def check(world: int, folder: Path, timeout_s: float) -> None:
    names = [f"tests.distributed.groups:{name}" for name in JOBS]
    outcome = launch(world, names, folder, timeout_s)
    failures = [f"{name}\n{text}" for name in names for text in outcome.failures[name]]
    assert not failures, "\n\n".join(failures)


def test_two_ranks(tmp_path: Path) -> None:
    check(2, tmp_path, 120)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    check(4, tmp_path, 240)
