"""The report's line about the process: what the system counts, and what of it is known."""

from __future__ import annotations

import gc
import json
import sys
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from actstore import ActivationStore, SampleErrors
from actstore.base.units import format_nbytes
from actstore.rerun.optimizers import SteppedOptimizers, live_optimizers
from actstore.session import process
from actstore.session.process import ProcessMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 2**20


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))


def test_the_parts_add_up_to_what_is_resident(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    store = ActivationStore(model, "int8")
    for _ in range(2):
        with store:
            loss = model(torch.randn(256, 512)).square().mean()
        loss.backward()
        optimizer.step()
    found = store.report().process
    assert found is not None
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert (found.weights_bytes, found.gradients_bytes) == (weights, weights)
    steps = 4 * len(list(model.parameters()))  # AdamW counts them in a float32 for each parameter
    assert found.optimizer_bytes == 2 * weights + steps
    assert f", optimizer {format_nbytes(found.optimizer_bytes)}, " in str(found)
    parts = (found.activations_bytes, found.optimizer_bytes, found.freed_bytes, found.other_bytes, 2 * weights)
    assert found.resident_bytes == sum(parts)
    assert found.peak_bytes >= found.resident_bytes > 100 * MIB
    assert found.allocator in ("pages", "threshold", "system") or " (" in found.allocator


def test_optimizers_are_searched_for_where_weights_change(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    monkeypatch.setattr(process, "live_optimizers", lambda: searches.append(1) or live_optimizers())
    optimizers = process.Optimizers(model)
    for _ in range(20):
        assert optimizers.find() == []
    assert not searches  # no weight has changed
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    for _ in range(20):
        with torch.no_grad():
            model[0].bias.add_(1)
        assert optimizers.find() == []
    assert len(searches) == 5  # after 1, 2, 4, 8 and 16 changes
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(20):
        with torch.no_grad():
            model[0].bias.add_(1)
        found = optimizers.find()
    assert found == [optimizer]
    assert stranger not in found
    assert len(searches) == 6


def test_an_optimizer_that_gc_freeze_has_hidden_is_found_after_its_next_step(model: nn.Module) -> None:
    optimizer, before = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), len(_global_optimizer_post_hooks)
    gc.freeze()
    store = ActivationStore(model, "keep")
    for _ in range(2):
        with store:
            loss = model(torch.randn(64, 512)).square().mean()
        loss.backward()
        optimizer.step()
        found = store.report().process
    assert found is not None
    assert found.optimizer_bytes == sum(parameter.nbytes for parameter in model.parameters())
    store.report()
    assert len(_global_optimizer_post_hooks) == before  # no longer needed


def test_the_watch_for_hidden_optimizers_ends_with_the_store(model: nn.Module) -> None:
    optimizers, before = process.Optimizers(model), len(_global_optimizer_post_hooks)
    with torch.no_grad():
        model[0].bias.add_(1)
    gc.freeze()
    assert optimizers.find() == []
    assert len(_global_optimizer_post_hooks) == before + 1
    del optimizers
    SteppedOptimizers(model, WeakSet()).close()
    assert len(_global_optimizer_post_hooks) == before


def test_a_store_may_be_collected_in_the_midst_of_an_optimizers_step(model: nn.Module) -> None:
    """Which goes through all hooks: none may go then."""
    optimizer, before = torch.optim.SGD(model.parameters(), 0.1), len(_global_optimizer_post_hooks)
    watching = [SteppedOptimizers(model, WeakSet())]
    hooks = [register_optimizer_step_post_hook(hook) for hook in (lambda *_: watching.clear(), lambda *_: None)]
    try:
        optimizer.step()
    finally:
        for hook in hooks:
            hook.remove()
    assert not watching
    SteppedOptimizers(model, WeakSet()).close()
    assert len(_global_optimizer_post_hooks) == before


def test_activations_are_those_that_are_held_now(model: nn.Module) -> None:
    store = ActivationStore(model, "int8", min_bytes=0, observe=[SampleErrors(every=0)])
    with store:
        loss = model(torch.randn(256, 512)).square().mean()
    held = store.report().process
    loss.backward()
    gone = store.report().process
    assert held is not None
    assert gone is not None
    assert held.activations_bytes == store.report().held_bytes > gone.activations_bytes == 0


def test_it_is_a_line_of_the_report_and_a_part_of_its_json(model: nn.Module) -> None:
    store = ActivationStore(model, "keep")
    with store:
        model(torch.randn(8, 512))
    report = store.report()
    line = str(report).splitlines()[-1 - len(report.advice)]
    assert line.startswith("process: peak ")
    assert "weights 4.0 MiB" in line
    assert json.loads(report.to_json())["process"]["weights_bytes"] == 4_200_448


def test_a_store_without_a_model() -> None:
    store = ActivationStore(policy="int8")
    with store:
        torch.randn(8, requires_grad=True).exp()
    found = store.report().process
    assert found is None or found.weights_bytes == 0


def test_without_proc_there_is_none(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STATUS", process.STATUS.with_name("nothing"))
    assert ProcessMemory.now(model, 0) is None
