"""Ctrl-C at moments all over a training step: it is never swallowed, and the store can be used afterwards."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks

from actstore import ActivationStore, Disk, SampleErrors
from actstore.autograd import compiled, modules
from actstore.autograd.unpack import forget_turn, turns
from actstore.base.job import finish
from actstore.base.reaper import Finalizer
from actstore.errors import StateError
from actstore.session.applied_policy import AppliedPolicy
from actstore.session.entries import StoreEntry, is_active
from tests.autograd.checks import check_drained, check_same, train_step
from tests.contracts.clean import traffic
from tests.system.interrupts import Instructions, Moments, in_package

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


def in_step(frame: FrameType) -> bool:
    """In this package, but for the first instruction of `__exit__`: what it has not begun, nothing can undo."""
    return in_package(frame) and frame.f_code is not ActivationStore.__exit__.__code__


def check_left(model: nn.Module) -> None:
    """Nothing of any store is left on this thread, nor in the model."""
    assert not is_active()
    assert _top_saved_tensors_default_hooks(True) is None
    assert not modules._trackers
    assert not turns
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("policy", POLICIES)
def test_an_interrupt_at_some_moments_of_a_step(tmp_path: Path, policy: str) -> None:
    """The next steps have the gradients of plain training, whatever the interrupt has left undone."""
    model, batch = build()
    wanted = train_step(model, batch)

    def step(at: int | None) -> Moments:
        store = ActivationStore(model, policy, min_bytes=0, tiers=[Disk(tmp_path)])
        check_same(train_step(model, batch, store), wanted)
        try:
            with Moments(in_step, at) as moments:
                train_step(model, batch, store)
        except KeyboardInterrupt:
            assert moments.where
        check_left(model)
        gc.collect()
        for _ in range(2):
            check_same(train_step(model, batch, store), wanted)
        store.close()
        assert not any(tmp_path.rglob("*"))
        inner = ref(store._store)
        del store
        gc.collect()
        assert inner() is None  # and with it goes all memory
        return moments

    count = step(None).count
    assert count > 300
    reached = [step(at).where for at in range(1, count, count // 25)]
    assert sum(map(bool, reached)) > 12


@pytest.mark.parametrize(
    ("policy", "stride"),
    [("raw @ device", 7), pytest.param("raw @ device", 1, marks=pytest.mark.slow), ("raw @ host", 1)],
)
def test_an_interrupt_at_each_moment_of_a_step_loses_no_memory(policy: str, stride: int) -> None:
    """Of payloads that do not travel: their buffers are back in the pool, which knows how many it has."""
    model, batch = build()
    wanted = train_step(model, batch)

    def step(at: int | None) -> int:
        store = ActivationStore(model, policy, min_bytes=0)
        train_step(model, batch, store)
        with suppress(KeyboardInterrupt), Moments(in_step, at) as moments:
            train_step(model, batch, store)
        gc.collect()
        check_drained(store)
        check_same(train_step(model, batch, store), wanted)
        check_drained(store)
        return moments.count

    count = step(None)
    assert count > 500
    for at in range(1, count + 1, stride):
        step(at)


@pytest.mark.parametrize("stride", [31, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["raw @ disk", "expack @ disk"])
def test_an_interrupt_at_moments_of_a_step_loses_nothing_that_travels(tmp_path: Path, policy: str, stride: int) -> None:
    """After the next step no bytes are booked, no buffer is missing, and no range of the file is in use."""
    model, batch = build()
    wanted = train_step(model, batch)

    def step(at: int | None) -> int:
        store = ActivationStore(model, policy, min_bytes=0, tiers=[Disk(tmp_path)])
        train_step(model, batch, store)
        with suppress(KeyboardInterrupt), Moments(in_step, at) as moments:
            train_step(model, batch, store)
        gc.collect()
        check_same(train_step(model, batch, store), wanted)
        check_drained(store)
        for place in store._store._places.values():
            place.engine.poll()
            assert traffic(place.engine) == {}
            disk: Any = place.tier("disk")
            if disk.used_nbytes:
                finish([job for left in disk._open.freed for job in left.jobs])
                assert disk.used_nbytes == 0
        assert [used for used, _ in store._store.ledger.media.values()] == [0]
        store.close()
        return moments.count

    count = step(None)
    assert count > 1000
    for at in range(1, count + 1, stride):
        step(at)


@pytest.mark.parametrize("policy", ["keep", "raw @ device", "raw @ host", "int8"])
def test_an_interrupt_at_each_moment_of_a_first_forward(policy: str) -> None:
    """Of a forward that has nothing to follow, and leaves a scope half way."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())
    batch = (torch.randn(64, 64),)
    wanted = train_step(model, batch, ActivationStore(model, policy, min_bytes=0))

    def forward(at: int | None) -> int:
        store = ActivationStore(model, policy, min_bytes=0)
        with suppress(KeyboardInterrupt), store, Moments(in_step, at) as moments:
            loss = model(*batch)
            del loss
        check_left(model)
        check_same(train_step(model, batch, store), wanted)
        gc.collect()
        assert store.report().live_bytes == 0
        return moments.count

    count = forward(None)
    assert count > 40
    for at in range(1, count + 1):
        forward(at)


@pytest.mark.parametrize(
    "policy",
    ["keep", "raw @ host", "int8", "* : recompute", "auto(64KiB)", pytest.param("bits(0)", marks=pytest.mark.slow)],
)
def test_an_interrupt_at_each_moment_of_entering_and_leaving(policy: str) -> None:
    """What was entered is left: no later tensor goes through hooks that nobody knows of."""
    model, batch = build()
    wanted = train_step(model, batch, ActivationStore(model, "keep" if "(" in policy else policy, min_bytes=0))
    store = ActivationStore(model, policy, min_bytes=0, observe=[SampleErrors(every=1)])

    def around(at: int | None) -> Moments:
        with Moments(in_step, at) as moments, store:
            sys.setprofile(None)
            model(*batch)
            sys.setprofile(moments.look)
        return moments

    for _ in range(4):  # "auto" and "bits" measure first
        found = train_step(model, batch, store)
    check_same(found, wanted)
    count = around(None).count
    assert count > 60
    for at in range(1, count + 1):
        with suppress(KeyboardInterrupt, StateError):  # "bits" does not go on measuring without a backward
            around(at)
        check_left(model)
    for _ in range(4):
        found = train_step(model, batch, store)
    check_same(found, wanted)
    gc.collect()
    assert store.report().live_bytes == 0


# Those that register and undo, but for `ActivationStore.__exit__`: what it has not begun, nothing can undo.
REGISTERING = {
    function.__code__
    for function in (
        ActivationStore.__enter__,
        ActivationStore._end_forward,
        StoreEntry.activate,
        StoreEntry._deactivate,
        StoreEntry.close,
        StoreEntry.unwind,
        AppliedPolicy.enter,
        AppliedPolicy.exit,
        forget_turn,
        compiled.wrap,
        compiled.unwrap,
        modules.start,
        modules.stop,
    )
}


@pytest.mark.parametrize("policy", ["raw @ host", "0 : recompute; 2 : recompute; * : int8", "auto(64KiB)"])
def test_an_interrupt_before_each_instruction_that_registers_or_undoes(policy: str) -> None:
    model, batch = build()
    own = model[4]._compiled_call_impl = model[4]._call_impl  # as `compile` does
    store = ActivationStore(model, policy, min_bytes=0, observe=[SampleErrors(every=1)])
    for _ in range(4):  # "auto" measures first
        found = train_step(model, batch, store)

    def around(at: int | None) -> int:
        with Instructions(REGISTERING, at) as instructions, store:
            pass
        return instructions.count

    count = around(None)
    assert count > 200
    reached = 0
    for at in range(1, count + 1):
        try:
            around(at)
        except KeyboardInterrupt:
            reached += 1
        check_left(model)
        assert not store._inside
        assert model[4]._compiled_call_impl is own
    assert reached > 0.9 * count  # without a turn to backward, a step takes a few instructions less
    for _ in range(4):
        again = train_step(model, batch, store)
    check_same(again, found)
    gc.collect()
    assert store.report().live_bytes == 0


@pytest.mark.parametrize("policy", ["keep", *POLICIES])
def test_an_interrupt_while_a_graph_dies(tmp_path: Path, policy: str, unraised: list[str]) -> None:
    """The death of what waits runs no Python code that an interrupt could end: there is no such moment."""
    model, batch = build()
    with ActivationStore(model, policy, min_bytes=0, tiers=[Disk(tmp_path)]) as store:
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
    last = Finalizer(given.append, 1)
    assert given == []
    del last
    assert given == [1]
    cycle = [Finalizer(given.append, 2)]
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    gc.collect()
    assert given == [1, 2]
