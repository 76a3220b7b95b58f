"""Ctrl-C at moments all over a training step: it is never swallowed, and the store can be used afterwards."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._autograd import _pop_saved_tensors_default_hooks, _top_saved_tensors_default_hooks

from actstore import ActivationStore
from actstore.reaper import Last
from actstore.session import _entries
from tests.autograd.checks import check_drained, check_same, train_step
from tests.system.interrupts import Moments, in_package

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES = ["raw @ device", "raw @ host", "raw @ disk"]


@pytest.fixture
def unraised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Python printed and forgot."""
    found: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: found.append(repr(seen.object)))
    return found


def build() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    half = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*half, nn.Linear(64, 8)), (torch.randn(64, 64),)


@pytest.fixture
def left_entered() -> Iterator[None]:
    """Leave the contexts whose entering or leaving was interrupted halfway."""
    yield
    while _top_saved_tensors_default_hooks(True) is not None:
        _pop_saved_tensors_default_hooks()
    _entries().clear()


@pytest.mark.usefixtures("left_entered")
@pytest.mark.parametrize("policy", POLICIES)
def test_an_interrupt_at_some_moments_of_a_step(tmp_path: Path, policy: str) -> None:
    """The next steps have the gradients of plain training, whatever the interrupt has left undone."""
    model, batch = build()
    wanted = train_step(model, batch)

    def step(at: int | None) -> Moments:
        store = ActivationStore(model, policy, min_bytes=0, disk_path=tmp_path)
        check_same(train_step(model, batch, store), wanted)
        try:
            with Moments(in_package, at) as moments:
                train_step(model, batch, store)
        except KeyboardInterrupt:
            assert moments.where
        gc.collect()
        for _ in range(2):
            check_same(train_step(model, batch, store), wanted)
        return moments

    count = step(None).count
    assert count > 300
    reached = [step(at).where for at in range(1, count, count // 25)]
    assert sum(map(bool, reached)) > 12


@pytest.mark.parametrize("policy", ["keep", *POLICIES])
def test_an_interrupt_while_a_graph_dies(tmp_path: Path, policy: str, unraised: list[str]) -> None:
    """The death of what waits runs no Python code that an interrupt could end: there is no such moment."""
    model, batch = build()
    with ActivationStore(model, policy, min_bytes=0, disk_path=tmp_path) as store:
        loss = model(*batch).square().mean()
    assert store.report().live_bytes > 0
    with Moments(in_package) as moments:
        del loss
    assert moments.count == 0
    check_drained(store)
    assert unraised == []
    store.close()


def test_what_dies_is_given_back_once() -> None:
    given: list[int] = []
    last = Last(given.append, 1)
    assert given == []
    del last
    assert given == [1]
    cycle = [Last(given.append, 2)]
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    gc.collect()
    assert given == [1, 2]
