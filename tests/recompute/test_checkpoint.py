"""Models that already checkpoint, and stores where they cannot be correct."""

import warnings
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from actstore import ActivationStore
from actstore.errors import StateError
from actstore.recompute.checkpoints import innermost_pack
from tests.autograd.checks import check_drained, check_same, gc_off
from tests.recompute.regions import Runs

POLICIES = ["keep", "raw", "raw @ disk", "int8"]


class Checkpointed(nn.Module):
    """As `gradient_checkpointing_enable` makes a model."""

    def __init__(self, *, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16)) for _ in range(3)
        )
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = x + (block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant))
        return x


@contextmanager
def nothing_said():
    """While a rule and the model's own checkpoints recompute the same, of which a store warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "blocks", RuntimeWarning)
        yield


def grads_of(model, x, store=None, *, inside=False):
    model.zero_grad()
    torch.manual_seed(1)
    if store is None:
        model(x).square().sum().backward()
    else:
        with store:
            loss = model(x).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_models_that_checkpoint_just_work(reentrant, policy):
    model, x = Checkpointed(reentrant=reentrant), torch.randn(5, 16, requires_grad=True)
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        found = grads_of(model, x, store)
        check_drained(store)
    check_same(found, grads_of(Checkpointed(reentrant=None), x))
    report = store.report()
    assert report.saved_bytes <= 4 * x.nbytes + 8000
    if policy == "int8":  # its operators would decide anew
        notes = {site.note for site in report.sites if site.saved_bytes}
        assert notes - {"kept: saved outside of the model: part of the loss"} == {
            "kept: backward of a checkpoint of the model's own needs all of its bits"
        }
    elif policy != "keep":
        assert report.stored_bytes > 0


@pytest.mark.parametrize("policy", [*POLICIES, "raw @ host", "derive", "recompute"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_backward_inside_of_the_context(reentrant, policy):
    x = torch.randn(5, 16, requires_grad=True)
    found = {}
    for inside in (False, True):
        model = Checkpointed(reentrant=reentrant)
        store = ActivationStore(model, policy, min_bytes=0)
        with gc_off(), nothing_said():
            found[inside] = grads_of(model, x, store, inside=inside)
            check_drained(store)
    if policy != "int8":
        check_same(found[True], grads_of(Checkpointed(reentrant=None), x))
    check_same(found[True], found[False])


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_reentrant_checkpoint_runs_again_is_no_part_of_the_forward(policy):
    reports = []
    for inside in (False, True):
        model, x = Checkpointed(reentrant=True), torch.randn(5, 16, requires_grad=True)
        store = ActivationStore(model, policy, min_bytes=0)
        for _ in range(2):  # the first step is one of those in which a lossy store measures
            grads_of(model, x, store, inside=inside)
        reports.append(store.report())
    outside, inside = reports
    for figure in ("saved_bytes", "stored_bytes", "held_bytes", "live_bytes"):
        assert getattr(inside, figure) == getattr(outside, figure)
    assert [(site.site, site.tensors) for site in inside.sites] == [(site.site, site.tensors) for site in outside.sites]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # in the outer one's forward
@pytest.mark.parametrize("policy", POLICIES)
def test_reentrant_checkpoints_of_functions_one_inside_the_other(policy):
    """No module runs, and so nothing but the node tells that backward runs forward again."""
    weight = torch.randn(16, 16, requires_grad=True)

    def inner(x):
        return (x @ weight).tanh() * x

    def outer(x):
        return checkpoint(inner, x.sin(), use_reentrant=True).cos()

    def grads(context):
        weight.grad = None
        x = torch.arange(80.0).view(5, 16).requires_grad_()
        with context:
            y = checkpoint(outer, x * 1, use_reentrant=True)
            (y * y).sum().backward()
        return weight.grad, x.grad

    store = ActivationStore(policy=policy, min_bytes=0)
    with gc_off():
        found = grads(store)
        check_drained(store)
    if policy != "int8":
        check_same(found, grads(nullcontext()))


def test_a_store_inside_a_checkpointed_region_is_refused():
    store, x = ActivationStore(policy="raw", min_bytes=0), torch.randn(5, requires_grad=True)

    def region(t):
        with store:
            return t.exp()

    with pytest.raises(StateError, match=r"inside a checkpointed region.*outside, around the checkpointed forward"):
        checkpoint(region, x, use_reentrant=False)
    with store:
        y = x.exp()
    check_same(torch.autograd.grad(y.sum(), x), (y.detach(),))


def test_a_store_inside_a_reentrant_region_is_refused_when_it_recomputes():
    store, x = ActivationStore(policy="raw", min_bytes=0), torch.randn(5, requires_grad=True)

    def region(t):
        with store:
            return t.exp()

    y = checkpoint(region, x, use_reentrant=True)
    with pytest.raises(StateError, match="inside a running backward"):
        y.sum().backward()


def test_a_store_inside_a_region_of_another_store_is_refused():
    class Enters(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, x):
            with inner:
                return (x * self.weight).exp()

    model = nn.Sequential(Enters())
    inner = ActivationStore(policy="raw", min_bytes=0)
    outer = ActivationStore(model, "0 : recompute", min_bytes=0)
    with pytest.raises(StateError, match="inside a checkpointed region"), outer:
        model(torch.randn(5))
    assert "forward" not in model[0].__dict__


class FailsOnce(nn.Module):
    """Fails in two checkpoints, one inside the other."""

    def __init__(self, error):
        super().__init__()
        self.inner, self.error = nn.Linear(16, 16), error

    def fails(self, x):
        error, self.error = self.error, None
        y = self.inner(x).sigmoid()
        if error is not None:
            raise error("mine")
        return y

    def outer(self, x):
        return checkpoint(self.fails, x.exp(), use_reentrant=False).tanh()

    def forward(self, x):
        return checkpoint(self.outer, x, use_reentrant=False)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("policy", ["keep", "raw @ disk", "1 : recompute", "1 : recompute(raw)"])
@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
def test_an_exception_in_a_checkpoint_reaches_the_caller_as_it_is(policy, error):
    model = nn.Sequential(nn.Linear(16, 16), FailsOnce(error), nn.Linear(16, 4))
    store, x = ActivationStore(model, policy, min_bytes=0), torch.randn(5, 16, requires_grad=True)
    with pytest.raises(error, match="mine") as info:
        grads_of(model, x, store)
    assert innermost_pack() is None  # though `info` holds the traceback, with which PyTorch 2.11 holds its hooks
    check_same(grads_of(model, x, store), grads_of(model, x))
    del info


class Catches(nn.Module):
    def __init__(self):
        super().__init__()
        self.fails = FailsOnce(None)

    def forward(self, x):
        self.fails.error = ValueError  # in a recompute too
        with suppress(ValueError):
            return self.fails(x)
        return self.fails(x.sin())


@pytest.mark.parametrize("policy", ["raw", "0.fails : recompute", "0 : recompute"])
@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
def test_an_exception_in_a_checkpoint_that_forward_catches(policy):
    model, x = nn.Sequential(Catches()), torch.randn(5, 16, requires_grad=True)
    check_same(grads_of(model, x, ActivationStore(model, policy, min_bytes=0)), grads_of(model, x))


@pytest.mark.parametrize("policy", ["raw", "recompute(raw)"])
@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
def test_a_checkpoint_inside_a_recomputed_module(policy):
    model, x = nn.Sequential(Checkpointed(reentrant=False)), torch.randn(5, 16, requires_grad=True)
    store = ActivationStore(model, f"0 : {policy}", min_bytes=0)
    found = grads_of(model, x, store)
    check_same(list(found.values()), list(grads_of(Checkpointed(reentrant=None), x).values()))


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_checkpoint_sequential(reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    x = torch.randn(3, 8, requires_grad=True)
    store = ActivationStore(model, "raw @ disk", min_bytes=0)
    with store:
        y = checkpoint_sequential(model, 2, x, use_reentrant=reentrant)
    assert store.report().stored_bytes > 0
    y.sum().backward()  # torch.autograd.grad is not for reentrant ones
    check_same(x.grad, torch.autograd.grad(model(x).sum(), x)[0])


class Reruns(nn.Module):
    """A block whose forward is checkpointed, as Transformers does it, or whose caller does it."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.reentrant, self.runs = reentrant, Runs()

    def inner(self, x):
        self.runs.append(1)
        return x + self.mlp(x)

    def forward(self, x):
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("* : recompute", r"^0 \(recompute\): the model checkpoints this module, .* compute it three times\. Switch"),
        ("*.mlp : recompute", r"^0\.mlp \(recompute\): the model runs this module inside a checkpoint .* no effect\. "),
    ],
)
def test_a_model_that_checkpoints_and_a_rule_that_recomputes_are_told_of_once(policy, words, reentrant):
    model, x = nn.Sequential(*(Reruns(reentrant=reentrant) for _ in range(3))), torch.randn(5, 16, requires_grad=True)
    store = ActivationStore(model, policy, min_bytes=0)
    with pytest.warns(RuntimeWarning, match=words) as told:
        found = grads_of(model, x, store)
    assert len(told) == 1
    assert "model.gradient_checkpointing_disable()" in str(told[0].message)
    assert len(model[0].runs) == (3 if reentrant and policy.startswith("* ") else 2)
    check_same(found, grads_of(model, x, store))  # and says no more
    for block in model:
        block.reentrant = None
    check_same(found, grads_of(model, x, ActivationStore(model, policy, min_bytes=0)))


def test_a_frozen_part_under_no_grad_is_no_checkpoint():
    model, x = nn.Sequential(Reruns(reentrant=None), Reruns(reentrant=None)), torch.randn(5, 16)
    store = ActivationStore(model, "* : recompute", min_bytes=0)
    with store:
        with torch.no_grad():
            x = model[0](x)
        loss = model[1](x).sum()
    loss.backward()
    assert [len(block.runs) for block in model] == [1, 2]


def test_early_stop_is_not_swallowed():
    """The recomputation ends when the last tensor is there: what follows does not run a second time."""
    runs = []

    class Tail(nn.Module):
        def forward(self, x):
            runs.append(torch.is_grad_enabled())
            return x + 1

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Tail()))
    x = torch.randn(3, 4, requires_grad=True)
    store = ActivationStore(model, "0 : recompute(raw)", min_bytes=0)
    with gc_off():
        with store:
            y = model(x)
        y.sum().backward()
        assert len(runs) == 1
        del y
        check_drained(store)


def test_names_are_right_after_a_recomputation_inside_the_context():
    model, x = Checkpointed(reentrant=False), torch.randn(5, 16, requires_grad=True)
    store = ActivationStore(model, "raw", min_bytes=0)
    with store:
        grads_of(model, x)
        y = x.exp()
    sites = [site.site for site in store.report().sites if site.live_bytes]
    assert sites
    assert all(site.startswith("(top)") for site in sites)
    del y
