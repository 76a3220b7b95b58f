"""Bytes by storage."""

from __future__ import annotations

import torch
from torch import nn

from actstore.bench.census import Census


def test_counts_each_storage_once_and_no_parameter() -> None:
    model = nn.Linear(8, 4, bias=False)
    x = torch.randn(16, 8, requires_grad=True)
    census = Census(model, "cpu")
    with census.plain():
        loss = (model(x).square() + model(x[:8]).repeat(2, 1)).sum()
    assert census.saved_bytes == x.nbytes + 16 * 4 * 4  # x once for both calls, and what square saves
    assert census.held_bytes == census.saved_bytes
    torch.autograd.backward(loss)
    assert census.held_bytes == x.nbytes


def test_what_died_is_no_longer_held() -> None:
    census = Census(nn.Identity(), "cpu")
    census.add(torch.zeros(1024))
    kept = torch.zeros(256)
    census.add(kept)
    census.add(kept[10:])
    assert census.saved_bytes == 4096 + 1024
    assert census.held_bytes == 1024


def test_other_devices_do_not_count() -> None:
    census = Census(nn.Identity(), "cuda")
    census.add(torch.zeros(1024))
    assert census.saved_bytes == 0
