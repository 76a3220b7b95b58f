"""After each test of this folder every store that it made is empty again."""

import gc
from collections import Counter
from collections.abc import Iterator
from threading import RLock
from weakref import WeakSet

import pytest

import actstore.autograd.hooks
import actstore.autograd.storages
from actstore import ActivationStore
from tests.autograd.checks import check_drained, train_step
from tests.autograd.models import build, policy_of


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What is imported by now is no garbage: collections look at a test's own objects only."""
    for name, decision in (("mlp", "int8"), ("mlp", "recompute(raw)")):
        model, batch = build(name)
        train_step(model, batch, ActivationStore(model, policy_of(name, decision), min_bytes=0))
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def drained(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Watch the stores of a test; what a kept traceback holds may need the collector."""
    made: WeakSet[ActivationStore] = WeakSet()
    init = ActivationStore.__init__

    def watched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.add(self)

    monkeypatch.setattr(ActivationStore, "__init__", watched)
    yield
    gc.collect()
    for store in made:
        check_drained(store)
        store.close()


@pytest.fixture(autouse=True)
def identified(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """No scope asks for a storage by an address that another one may have by then: that would read freed memory.

    Returns the number of weak references of scopes, by address.
    """
    held: Counter[int] = Counter()
    lock = RLock()  # threads add and take at once, and a collection may free in between
    hold, free, revive = (
        actstore.autograd.storages.hold_weak,
        actstore.autograd.storages.free_weak,
        actstore.autograd.storages.revive,
    )

    def hold_weak(storage):
        with lock:
            held[storage._cdata] += 1
        return hold(storage)

    def free_weak(key):
        with lock:
            held[key] -= 1
        free(key)

    def revived(key):
        assert held[key] > 0, "an address without a weak reference"
        return revive(key)

    monkeypatch.setattr(actstore.autograd.storages, "hold_weak", hold_weak)
    monkeypatch.setattr(actstore.autograd.hooks, "hold_weak", hold_weak)
    monkeypatch.setattr(actstore.autograd.storages, "free_weak", free_weak)
    monkeypatch.setattr(actstore.autograd.hooks, "free_weak", free_weak)
    monkeypatch.setattr(actstore.autograd.storages, "revive", revived)
    return held
