"""When bytes die: by reference counts alone, the collector is off in every test here."""

import gc
import threading
from contextlib import suppress
from weakref import ref

import pytest
import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from actstore import ActivationStore
from actstore.autograd.hooks import Scope
from actstore.errors import StateError
from tests.autograd.checks import check_drained, check_same, gc_off, pools, train_step
from tests.autograd.models import LOSSLESS, build, policy_of

STORED = ["raw", "raw @ host", "raw @ disk", "int8", "int8 @ disk"]
POLICIES = ["keep", *STORED]


@pytest.fixture(autouse=True)
def no_collector():
    with gc_off():
        yield


def make(policy, **options):
    return ActivationStore(policy=policy, min_bytes=0, **options)


def chain(x, steps=4):
    """Each step saves its own output and nothing else."""
    for _ in range(steps):
        x = x.exp().mul(0.1)
    return x


def alive(store):
    return store.report().live_bytes


@pytest.mark.parametrize("policy", STORED)
def test_the_original_dies_when_it_is_stored(policy):
    x = torch.randn(64, requires_grad=True)
    with make(policy):
        h = x * 2
        weak, storage = ref(h), StorageWeakRef(h.untyped_storage())
        y = h * h
        del h
    assert weak() is None
    assert storage.expired()
    del y


@pytest.mark.parametrize("policy", [policy for policy in STORED if policy != "int8"])
def test_what_requires_no_gradient_dies_one_node_later(policy):
    x, c = torch.randn(64, requires_grad=True), torch.randn(64)
    storage = StorageWeakRef(c.untyped_storage())
    with make(policy):
        y = x * c
        del c
        assert not storage.expired()
        z = y.exp()
        assert storage.expired()
    del y, z


@pytest.mark.parametrize("policy", [policy for policy in STORED if policy != "int8"])
def test_what_requires_no_gradient_dies_at_the_exit(policy):
    x, c = torch.randn(64, requires_grad=True), torch.randn(64)
    storage = StorageWeakRef(c.untyped_storage())
    with make(policy):
        y = x * c
        del c
    assert storage.expired()
    del y


@pytest.mark.parametrize("policy", POLICIES)
def test_the_packed_tensor_object_itself_is_not_held(policy):
    """An output held by its own graph would be a cycle."""
    x = torch.randn(64, requires_grad=True)
    store = make(policy)
    with store:
        y = x.exp()
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert storage.expired()
    check_drained(store)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_dropped_without_backward_frees_all_at_once(policy):
    store = make(policy)
    with store:
        y = chain(torch.randn(64, requires_grad=True))
    assert alive(store) > 0
    del y
    check_drained(store)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_dropped_inside_the_context_frees_all_at_once(policy):
    store = make(policy)
    with store:
        y = chain(torch.randn(2**20, requires_grad=True), 2)
        del y
        assert alive(store) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_frees_step_by_step(policy):
    big = 2**19 if policy == "keep" else 64  # kept tensors are accounted for one by one from 1 MiB
    store = make(policy)
    x = torch.randn(big, requires_grad=True)
    seen = []
    with store:
        h = x
        for _ in range(3):
            h = h.exp().mul(0.1)
            h.register_hook(lambda _: seen.append(alive(store)))
    y = h.sum()
    del h
    y.backward()
    assert len(seen) == 3
    assert seen[0] > seen[1] > seen[2] > 0
    check_drained(store)


@pytest.mark.parametrize("policy", POLICIES)
def test_retain_graph_keeps_and_repeats(policy):
    store = make(policy)
    x = torch.randn(64, requires_grad=True)
    with store:
        y = chain(x)
    before = alive(store)
    grads = [torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(3)]
    assert alive(store) == before > 0
    check_same(grads[1], grads[0])
    check_same(grads[2], grads[0])
    last = torch.autograd.grad(y.sum(), x)
    check_same(last, grads[0])
    del y
    check_drained(store)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_backward_without_retain_graph_is_refused_as_ever(policy):
    store = make(policy)
    x = torch.randn(64, requires_grad=True)
    with store:
        y = chain(x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    check_drained(store)


@pytest.mark.parametrize("policy", POLICIES)
def test_unused_outputs_and_partial_backward(policy):
    store = make(policy)
    x = torch.randn(64, requires_grad=True)
    for _ in range(3):
        with store:
            used, unused = chain(x), chain(x * 2)
        torch.autograd.grad(used.sum(), x)
        assert alive(store) > 0
        del used, unused
        check_drained(store)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_that_outlives_its_step(policy):
    """One branch is kept for the next step, as stateful recurrent training does."""
    store, x = make(policy), torch.randn(64, requires_grad=True)
    state, wanted = torch.zeros(64), torch.zeros(64)
    grads = []
    for _ in range(3):
        with store:
            state = (state + x).tanh()
        grads.append(torch.autograd.grad(state.sum(), x, retain_graph=True))
    found = grads[-1]
    for _ in range(3):
        wanted = (wanted + x).tanh()
    if "int8" not in policy:
        check_same(found, torch.autograd.grad(wanted.sum(), x))
    del state
    check_drained(store)


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.inner, self.error, self.armed = nn.Linear(16, 16), error, True

    def forward(self, x):
        y = self.inner(x).sigmoid()
        if self.armed:
            raise self.error
        return y


@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("policy", [*LOSSLESS, "int8"])
def test_an_exception_in_forward_leaves_no_state(policy, error):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(Fails(error)), nn.Linear(16, 4))
    policy = f"1 : {policy}" if policy.startswith("recompute") else policy
    store = ActivationStore(model, policy, min_bytes=0)
    batch = (torch.randn(3, 16),)
    with pytest.raises(type(error)) as info:
        train_step(model, batch, store)
    assert info.value is error
    error.__traceback__ = None
    del info
    gc.collect()
    check_drained(store)
    assert "forward" not in model[1].__dict__
    model[1][0].armed = False
    found = train_step(model, batch, store)
    if policy != "int8":
        check_same(found, train_step(model, batch))
    sites = {site.site.partition("[")[0] for site in store.report().sites if site.saved_bytes}
    assert sites <= {"0", "1", "1.0", "1.0.inner", "2", "(top)"}
    check_drained(store)


def test_an_exception_caught_inside_the_context_leaves_the_names_right():
    error = ValueError("mine")
    model = nn.Sequential(nn.Linear(16, 16), Fails(error))
    store = ActivationStore(model, "raw", min_bytes=0)
    x = torch.randn(3, 16, requires_grad=True)
    with store:
        with pytest.raises(ValueError, match="mine"):
            model(x)
        error.__traceback__ = None
        y = x.exp()
        model[1].armed = False
        z = model(x)
    sites = [site.site for site in store.report().sites]
    assert [site for site in sites if site.startswith("(top)")] == ["(top)[0]"]
    assert "1[1]" not in sites
    del y, z


def test_names_are_right_from_the_call_after_a_caught_interrupt():
    error = KeyboardInterrupt()
    model = nn.Sequential(nn.Linear(16, 16), Fails(error))  # torch runs no hooks when it is interrupted
    store = ActivationStore(model, "raw", min_bytes=0)
    x = torch.randn(3, 16, requires_grad=True)
    with store:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        error.__traceback__ = None
        model[1].armed = False
        y = model(x)
        z = y.exp()
    sites = [site.site for site in store.report().sites]
    assert [site for site in sites if site.startswith("(top)")] == ["(top)[0]"]
    assert "1[1]" not in sites
    del y, z


@pytest.mark.parametrize("decision", ["recompute(int8)", "recompute", "int8"])
def test_an_interrupt_that_forward_itself_catches_ends_what_was_recomputed(decision):
    """What comes next is no input of the region, and the calls after it have their own names."""

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Sequential(Fails(KeyboardInterrupt())), nn.Linear(16, 16)

        def forward(self, x):
            with suppress(KeyboardInterrupt):
                self.first(x)
            return self.second(x.sin()).exp() * 2

    torch.manual_seed(0)
    model = nn.Sequential(Catches(), nn.Linear(16, 4))
    model[0].second.requires_grad_(False)
    store = ActivationStore(model, f"0.first : {decision}; * : raw", min_bytes=0)
    x = torch.randn(3, 16, requires_grad=True)
    with store:
        y = model(x)
    model[0].first[0].error.__traceback__ = None
    sites = {site.site: site for site in store.report().sites if site.saved_bytes}
    assert sites["1[0]"].decision == "raw"
    found = torch.autograd.grad(y.sum(), x)
    if decision.startswith("recompute"):
        assert not any(name.startswith("0.first.") for name in sites)
        assert [name for name in sites if name.startswith("0.first") and sites[name].decision == "int8"][1:] == []
        check_same(found, torch.autograd.grad(model(x).sum(), x))
    del y


def test_an_exception_in_a_users_hook():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    store = ActivationStore(model, "raw", min_bytes=0)
    batch = (torch.randn(3, 16),)

    def hook(*_):
        raise ValueError("mine")

    for register in (model[0].register_forward_hook, model[0].register_forward_pre_hook):
        handle = register(hook)
        with pytest.raises(ValueError, match="mine"):
            train_step(model, batch, store)
        handle.remove()
        check_same(train_step(model, batch, store), train_step(model, batch))
    gc.collect()
    check_drained(store)


@pytest.mark.parametrize("policy", ["raw", "raw @ disk"])
def test_an_exception_in_backward(policy):
    store, x = make(policy), torch.randn(64, requires_grad=True)
    with store:
        h = chain(x, 2)
        y = chain(h, 2)

    def hook(_):
        raise ValueError("mine")

    handle = h.register_hook(hook)
    before = alive(store)
    with pytest.raises(ValueError, match="mine"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert alive(store) == before
    handle.remove()
    check_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(chain(chain(x, 2), 2).sum(), x))
    del y, h, handle
    gc.collect()
    check_drained(store)


@pytest.mark.parametrize("policy", STORED)
def test_close_returns_everything_and_later_backwards_say_so(policy):
    store, x = make(policy), torch.randn(64, requires_grad=True)
    with store:
        y = x.exp()
    store.close()
    assert alive(store) == 0
    with pytest.raises(
        StateError, match=r"while decoding \(top\)\[0\].*closed before backward.*after the last backward"
    ):
        torch.autograd.grad(y.sum(), x)
    store.close()


def test_close_leaves_what_was_kept():
    store, x = make("keep"), torch.randn(64, requires_grad=True)
    with store:
        y = x.exp()
    store.close()
    check_same(torch.autograd.grad(y.sum(), x), (y.detach(),))


def test_close_inside_the_own_context_is_refused():
    store = make("raw")
    with store, pytest.raises(StateError, match=r"close\(\) was called inside"):
        store.close()
    with store:
        pass


@pytest.mark.parametrize("policy", STORED)
def test_a_closed_store_is_not_used_again(policy):
    store, x = make(policy), torch.randn(64, requires_grad=True)
    store.close()
    with pytest.raises(StateError, match=r"closed. Make a new ActivationStore"), store:
        x.exp()


@pytest.mark.parametrize("policy", ["raw", "raw @ disk"])
def test_a_dead_store_still_serves_its_graphs(policy):
    x = torch.randn(64, requires_grad=True)
    with make(policy):
        y = x.exp()
    check_same(torch.autograd.grad(y.sum(), x), (y.detach(),))


@pytest.mark.parametrize("decision", [*LOSSLESS, "int8", "recompute(int8)"])
def test_many_steps_do_not_grow(decision):
    model, batch = build("transformer")
    store = ActivationStore(model, policy_of("transformer", decision), min_bytes=0)
    sizes = set()
    for _ in range(4):
        train_step(model, batch, store)
        sizes.add((len(store._store._entries), len(store._store.ledger.accounts()), len(store._applied.places)))
        check_drained(store)
    assert len(sizes) == 1


def test_handles_may_die_on_another_thread():
    store, graphs = make("raw @ disk"), []
    with store:
        graphs.extend(chain(torch.randn(64, requires_grad=True)) for _ in range(20))
    thread = threading.Thread(target=graphs.clear)
    thread.start()
    thread.join()
    check_drained(store)
    assert dict(pools(store))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_handle_in_a_cycle_is_freed_by_the_collector(policy):
    store = make(policy)
    with store:
        pack, _ = _top_saved_tensors_default_hooks(False)
        cycle = [pack(torch.randn(64, requires_grad=True) * 2)]
    cycle.append(cycle)
    assert alive(store) > 0
    del cycle, pack, _
    gc.collect()
    check_drained(store)


def test_an_entry_leaves_no_cycle():
    """With gc off, what a forward remembers dies with its graph."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    store = ActivationStore(model, "raw", min_bytes=0)
    with gc_off():
        for _ in range(3):
            with store:
                y = model(torch.ones(2, 4))
            y.sum().backward()
            del y
        assert [each for each in gc.get_objects() if type(each) is Scope] == []
