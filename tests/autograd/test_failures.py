"""Where forward or backward fails in the middle: the error keeps its type, and what was stored dies with its graph."""

import gc
import os
import threading

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Encode, Keep, Offload
from actstore.autograd.handles import Stored
from actstore.base.ledger import Ledger
from actstore.codecs import Raw
from actstore.policy import parse_decision
from actstore.session.entries import is_active
from actstore.store.store import Store
from tests.autograd.checks import check_drained, check_same, gc_off, pools, settle, train_step

POLICIES = ["keep", "raw", "raw @ host", "raw @ disk"]


class Mine(Exception):
    pass


def make(policy, model=None, **options):
    return ActivationStore(model, policy, min_bytes=0, **options)


def chain(x, steps=4):
    for _ in range(steps):
        x = x.exp().mul(0.1)
    return x


def message_of(run):
    """The text of a RuntimeError, without what its traceback holds."""
    with pytest.raises(RuntimeError) as info:
        run()
    return str(info.value)


@pytest.mark.parametrize("decision", [Keep(), Encode(Raw()), Offload(Raw(), "disk")], ids=str)
def test_a_save_that_fails_frees_what_was_saved_before_it(decision):
    """The hooks are left, too, and the store works on."""

    def decide(site, _):
        if site.index == 3:
            raise Mine(f"at {site}")
        return decision

    store, x = make(decide), torch.randn(2**18, requires_grad=True)
    with gc_off():
        with pytest.raises(Mine, match=r"at \(top\)\[3\]") as info, store:
            chain(x)
        del info
        check_drained(store)
        assert not is_active()
        with store:
            y = chain(x, 2)
        check_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(chain(x, 2).sum(), x))
        del y
        check_drained(store)


@pytest.mark.parametrize("policy", ["raw", "raw @ host", "raw @ disk"])
@pytest.mark.parametrize(
    "error", [Mine("mine"), KeyboardInterrupt(), MemoryError("full")], ids=lambda e: type(e).__name__
)
def test_a_read_that_fails_keeps_its_type_and_frees_nothing(policy, error, monkeypatch):
    store, x = make(policy), torch.randn(64, requires_grad=True)
    with store:
        y = chain(x)
    before = store.report().live_bytes
    with monkeypatch.context() as patch:
        for owner, name in ((Stored, "_read"), (Store, "get")):
            patch.setattr(owner, name, lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)) as info:
            torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert info.value is error
    del info
    error.__traceback__ = None
    assert store.report().live_bytes == before
    check_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(chain(x).sum(), x))


def test_a_save_whose_error_ends_in_a_cycle_leaves_its_buffer_to_the_pool(monkeypatch):
    store, x = make("raw"), torch.randn(64, requires_grad=True)
    with monkeypatch.context() as patch, store:
        patch.setattr(Ledger, "add", lambda *_, **__: (_ for _ in ()).throw(Mine("mine")))
        with pytest.raises(Mine) as info:
            chain(x)
    info.value.cycle = info
    del info
    gc.collect()
    check_drained(store)
    assert dict(pools(store)) == {"buffers": 0, "device": 0}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backward_that_failed_is_over_and_its_graph_frees_the_rest(policy):
    """Without retain_graph there is no second try: autograd says so as ever, and nothing waits for it."""

    def fail(_):
        raise Mine("mine")

    def prepare(store):
        x = torch.randn(2**18, requires_grad=True)
        with store:
            h = chain(x, 2)
            y = chain(h, 2).sum()
        h.register_hook(fail)
        return y

    store, plain = make(policy), prepare(torch.enable_grad())
    y = prepare(store)
    before = store.report().live_bytes
    for loss in (y, plain):
        with pytest.raises(Mine):
            loss.backward()
    assert 0 < store.report().live_bytes < before
    assert message_of(y.backward) == message_of(plain.backward)
    with gc_off():
        y = prepare(store)
        with pytest.raises(Mine) as info:
            y.backward()
        info.value.__traceback__ = None
        del info, y
    x = torch.randn(64, requires_grad=True)
    with store:
        y = chain(x)
    check_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(chain(x).sum(), x))
    del y, loss


@pytest.mark.parametrize("policy", POLICIES)
def test_experts_that_few_tokens_reach_leave_nothing(policy):
    """Each step other ones run, and of some nobody asks for the gradient."""
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4))
    store, tokens, parameters = make(policy, experts), torch.randn(24, 16), list(experts.parameters())

    def outputs(step):
        chosen = (torch.arange(24) * (step + 1)) % 4
        return [expert(tokens[chosen == i]) for i, expert in enumerate(experts) if (chosen == i).any()]

    with gc_off():
        for step in range(6):
            with store:
                found = outputs(step)
            grads = torch.autograd.grad(found[0].sum() + found[-1].sum(), parameters, allow_unused=True)
            del found
            check_drained(store)
            plain = outputs(step)
            check_same(grads, torch.autograd.grad(plain[0].sum() + plain[-1].sum(), parameters, allow_unused=True))


@pytest.mark.parametrize("backward_first", [True, False], ids=["backward_while_they_wait", "backward_afterwards"])
def test_a_source_may_change_and_die_while_its_bytes_are_still_on_their_way(backward_first, monkeypatch):
    """Writers that are late read memory of the store's own."""
    write, may_write, asked = os.pwritev, threading.Event(), threading.Event()

    def late(*args):
        asked.set()
        assert may_write.wait(120)
        return write(*args)

    monkeypatch.setattr(os, "pwritev", late)
    store, x = make("raw @ disk"), torch.randn(2**19, requires_grad=True)
    try:
        with store:
            h = x * 1
            y = h.square().sin()
        with torch.no_grad():
            h.data.fill_(7)  # no version tells
        del h
        assert asked.wait(120)
        if not backward_first:
            may_write.set()
            for place in store._store._places.values():
                settle(place.engine)
        found = torch.autograd.grad(y.sum(), x)
    finally:
        may_write.set()
    check_same(found, torch.autograd.grad((x * 1).square().sin().sum(), x))


@pytest.mark.parametrize("where", ["first", "later"])
@pytest.mark.parametrize("policy", ["raw", "raw @ host", "raw @ disk"])
def test_a_policy_that_fails_leaves_nothing_booked(policy, where):
    """The error passes as it is, and the next step is a good one."""
    decision, asked = parse_decision(policy), []

    def choose(site, spec):
        asked.append(site)
        if len(asked) == (1 if where == "first" else 3):
            raise LookupError("no decision")
        return decision

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    batch, store = (torch.randn(4, 8, requires_grad=True),), make(choose, model)
    with gc_off():
        with pytest.raises(LookupError, match="no decision"):
            train_step(model, batch, store)
        assert len(asked) == (1 if where == "first" else 3)
        check_drained(store)
        check_same(train_step(model, batch, store), train_step(model, batch))
        check_drained(store)
