"""Large tensors go to disk from their own memory, and come back as they were when they were saved."""

import errno
import gc
import os
import threading
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch

from actstore import ActivationStore, MutationError
from actstore.errors import ActstoreError
from actstore.snapshot import address_of
from actstore.transfer import engine
from actstore.transfer.traffic import Traffic
from tests.autograd.checks import check_drained
from tests.test_snapshot import CHANGES
from tests.tiers.test_disk import Gate

NUMEL = 50_000


@pytest.fixture(autouse=True)
def small_payloads_travel_alone(monkeypatch):
    monkeypatch.setattr(engine, "SMALL_NBYTES", 64)


@pytest.fixture
def make_store(disk_folder):
    return partial(ActivationStore, policy="raw @ disk", min_bytes=0, disk_path=disk_folder)


def engine_of(store):
    (place,) = store._store._places.values()
    return place.engine


def land(store):
    """Wait until nothing is on its way out any more."""
    transfers = engine_of(store)
    for window in transfers._traffic.windows.values():
        for parcel in list(window.flights):
            with suppress(ActstoreError):
                parcel.motion.wait_on(None)
    transfers.poll()


def squared(x):
    """A tensor that waits in the store, and its square: its gradient is twice itself."""
    hidden = x * 1
    return hidden, hidden * hidden


def grad_of(hidden, y):
    return torch.autograd.grad(y.sum(), hidden, retain_graph=True)[0]


def right_after(how, make_store, monkeypatch, twice=True):
    """Whether gradients are right, of a tensor that changes while its write has not begun: at once, and after it."""
    gate = Gate(monkeypatch)
    store = make_store(allow_mutation=True)
    x = torch.randn(NUMEL, requires_grad=True)
    with store:
        hidden, y = squared(x)
    CHANGES[how](hidden.detach())
    assert hidden.untyped_storage().nbytes() == 0 or not torch.equal(hidden, x)
    found = [grad_of(hidden, y)]
    gate.open()
    if twice:
        land(store)
        found.append(grad_of(hidden, y))
    del y, hidden
    check_drained(store)
    store.close()
    return [torch.equal(grad, 2 * x) for grad in found]


@pytest.mark.parametrize("how", [how for how in CHANGES if how not in ("other memory", "its storage grows")])
def test_what_changes_on_its_way(make_store, monkeypatch, how):
    assert right_after(how, make_store, monkeypatch) == [True, True]


def test_an_alias_would_not_do(make_store, monkeypatch):
    """The test of the test above."""
    monkeypatch.setattr(engine, "snapshot", lambda tensor: tensor.detach().view(torch.uint8))
    assert right_after("in place", make_store, monkeypatch, twice=False) == [False]


def test_a_change_is_refused_as_elsewhere(make_store):
    store = make_store()
    with store:
        hidden, y = squared(torch.randn(NUMEL, requires_grad=True))
    hidden.detach().add_(1)
    with pytest.raises(MutationError, match="is at version 1; expected version 0"):
        grad_of(hidden, y)
    store.close()


def test_a_tensor_that_is_dropped_on_its_way(make_store, monkeypatch):
    gate = Gate(monkeypatch)
    store = make_store()
    x = torch.randn(NUMEL, requires_grad=True)
    with store:
        y = squared(x)[1]
    gc.collect()
    others = [torch.full((NUMEL,), 7.0) for _ in range(20)]
    gate.open()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x)
    assert len(others) == 20
    assert not any("held" in site.note for site in store.report().sites)
    store.close()


def test_nothing_is_copied_on_the_way_out(make_store, monkeypatch):
    moved = []
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: (moved.extend(views), write(fd, views, at))[1])
    store = make_store()
    with store:
        hidden, y = squared(torch.randn(NUMEL, requires_grad=True))
    land(store)
    assert engine_of(store)._traffic.buffers.allocated == 0
    begins = [np.asarray(view).ctypes.data - address_of(hidden.detach()) for view in moved]
    inside = [len(view) for view, begin in zip(moved, begins, strict=True) if 0 <= begin < 4 * NUMEL]
    assert sum(inside) > 4 * NUMEL - 2 * 4096
    assert torch.equal(grad_of(hidden, y), 2 * hidden)
    store.close()


def test_it_counts_as_held_until_it_has_left(make_store, monkeypatch):
    gate = Gate(monkeypatch)
    store = make_store()
    with store:
        hidden, y = squared(torch.randn(NUMEL, requires_grad=True))
    assert store.report().held_bytes == 4 * NUMEL
    assert store.report().live_bytes == 4 * NUMEL
    gate.open()
    land(store)
    assert [(a.held, a.away) for a in store._store.ledger.accounts() if a.stored] == [(0, 4 * NUMEL)]
    del hidden, y
    check_drained(store)
    store.close()


def test_a_write_that_fails_leaves_the_bytes_that_were_saved(make_store, monkeypatch):
    go = threading.Event()

    def full(fd, views, at):
        assert go.wait(20)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    store = make_store(allow_mutation=True)
    x = torch.randn(NUMEL, requires_grad=True)
    with store:
        hidden, y = squared(x)
    hidden.detach().zero_()
    go.set()
    with pytest.warns(RuntimeWarning, match="could not leave the device"):
        land(store)
    assert torch.equal(grad_of(hidden, y), 2 * x)
    assert torch.equal(grad_of(hidden, y), 2 * x)
    del y, hidden
    check_drained(store)
    store.close()


class Spoils(torch.autograd.Function):
    """Its backward changes what it saved, as it may."""

    @staticmethod
    def forward(ctx, x):
        y = x * 1
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        found = grad * y
        with torch.no_grad():
            y.zero_()
        return found


@pytest.mark.parametrize("stays", [False, True], ids=["fetched", "still on the device"])
def test_who_changes_what_came_back_leaves_the_tensor_alone(make_store, monkeypatch, stays):
    if stays:
        monkeypatch.setattr(Traffic, "stays", lambda self, parcel: True)
    store = make_store()
    x = torch.randn(NUMEL, requires_grad=True)
    with store:
        y = Spoils.apply(x)
    land(store)
    for _ in range(3):
        (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(found, x)
    assert torch.equal(y, x)
    del y
    check_drained(store)
    store.close()


def test_memory_that_numpy_has_too_is_copied(make_store, monkeypatch):
    gate = Gate(monkeypatch)
    store = make_store()
    x = torch.randn(NUMEL, requires_grad=True)
    array = np.ones(NUMEL, dtype=np.float32)
    with store:
        y = x * torch.from_numpy(array)
        z = y * 1
    array[:] = 5
    gate.open()
    z.sum().backward()
    assert torch.equal(x.grad, torch.ones(NUMEL))
    store.close()


def test_verified_payloads_have_a_checksum_of_their_own(make_store):
    store = make_store(verify=True)
    with store:
        hidden, y = squared(torch.randn(NUMEL, requires_grad=True))
    assert torch.equal(grad_of(hidden, y), 2 * hidden)
    assert engine_of(store)._traffic.buffers.allocated > 0
    store.close()
