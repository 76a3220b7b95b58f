"""Bytes by storage."""

from __future__ import annotations

import torch
from torch import nn

from actstore.bench.peers.census import Census


def test_counts_each_storage_once_and_no_parameter() -> None:
    model = nn.Linear(8, 4, bias=False)
    x = torch.randn(16, 8, requires_grad=True)
    census = Census(model, "cpu")
    with census.plain():
        loss = (model(x).square() + model(x[:8]).repeat(2, 1)).sum()
    assert census.saved_bytes == x.nbytes + 16 * 4 * 4  # x once for both calls, and what square saves
    torch.autograd.backward(loss)
    census.add(torch.zeros(8))
    assert census.saved_bytes == x.nbytes + 16 * 4 * 4  # what comes after forward does not count


def test_other_devices_do_not_count() -> None:
    census = Census(nn.Identity(), "cuda")
    census.add(torch.zeros(1024))
    assert census.saved_bytes == 0
