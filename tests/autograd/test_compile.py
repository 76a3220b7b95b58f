"""torch.compile around, inside and below a store: plain gradients, names, and words for what it holds."""

import copy
import pickle

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.autograd.protect import COMPILED
from tests.autograd.checks import check_drained, check_same, train_step

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler about itself


class Block(nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(64, 64), nn.Linear(64, 64), breaks

    def forward(self, x):
        h = torch.tanh(self.up(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + torch.tanh(self.down(h))


def build(how, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Block(how == "breaks"), Block(how == "breaks"), nn.Linear(64, 4))
    if how == "blocks":
        for block in model[:2]:
            block.compile(backend=backend)
        return model, model
    return model, torch.compile(model, backend=backend)


def gradients(model, call, batch, store=None):
    """Of a step of `call`, by the names of `model`."""
    model.zero_grad()
    if store is None:
        loss = call(*batch).square().mean()
    else:
        with store:
            loss = call(*batch).square().mean()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("policy", ["keep", "raw", "raw @ disk", "0 : recompute(raw); * : raw"])
@pytest.mark.parametrize("how", ["whole", "blocks", "breaks"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_are_those_without_a_store(backend, how, policy):
    model, call = build(how, backend)
    batch, store = (torch.randn(32, 64),), ActivationStore(model, policy, min_bytes=0)
    for _ in range(2):
        found = gradients(model, call, batch, store)
        check_drained(store)
    assert store.report().saved_bytes > 0
    assert (store.report().stored_bytes > 0) == (policy != "keep")
    check_same(found, gradients(model, call, batch))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "blocks", "breaks"])
def test_inductor(how):
    model, call = build(how, "inductor")
    batch = (torch.randn(32, 64),)
    wanted = gradients(model, call, batch)
    for policy in ("raw", "raw @ disk"):
        store = ActivationStore(model, policy, min_bytes=0)
        for _ in range(2):
            check_same(gradients(model, call, batch, store), wanted)
        assert store.report().stored_bytes > 0
        check_drained(store)


def test_rules_reach_compiled_blocks():
    model, call = build("blocks", "aot_eager")
    store = ActivationStore(model, "0 : raw; 1 : raw @ disk; * : keep", min_bytes=0)
    gradients(model, call, (torch.randn(32, 64),), store)
    by_site = {site.site: site.decision for site in store.report().sites if site.stored_bytes}
    assert set(by_site) >= {"0[0]", "1[0]"}
    assert {name.partition("[")[0]: decision for name, decision in by_site.items()} == {"0": "raw", "1": "raw @ disk"}


def test_a_whole_compiled_model_is_the_model_and_not_the_loss():
    model, call = build("whole", "aot_eager")
    for given in (model, call):
        store = ActivationStore(given, "int8", min_bytes=0)
        gradients(model, call, (torch.randn(32, 64),), store)
        notes = [site.note for site in store.report().sites if site.site != "(top)[0]"]  # also of the loss
        assert set(notes) == {f"kept: {COMPILED}"}
        store = ActivationStore(given, "unprotected int8", min_bytes=0)
        gradients(model, call, (torch.randn(32, 64),), store)
        assert store.report().stored_bytes < 0.3 * store.report().saved_bytes


def test_what_a_compiled_region_reads_at_once_is_told():
    model, call = build("whole", "aot_eager")
    batch, store = (torch.randn(32, 64),), ActivationStore(model, "unprotected int8", min_bytes=0)
    gradients(model, call, batch, store)
    report = store.report()
    assert report.peak_held_bytes > report.saved_bytes
    assert "at once by one compiled region" in report.advice[0]
    with store:  # the next forward has read nothing yet
        loss = call(*batch).square().mean()
    assert not any("compiled" in sentence for sentence in store.report().advice)
    del loss
    model, call = build("blocks", "aot_eager")
    store = ActivationStore(model, "unprotected int8", min_bytes=0)
    gradients(model, call, batch, store)
    assert store.report().peak_held_bytes < report.peak_held_bytes
    assert not any("compiled" in sentence for sentence in store.report().advice)


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_what_a_compiled_region_saves_has_its_true_reason_and_two_ways_out(how):
    model, call = build(how, "aot_eager")
    batch = (torch.randn(256, 64),)
    store = ActivationStore(model, "int8", min_bytes=0)
    gradients(model, call, batch, store)
    report = store.report()
    assert report.held_bytes > 0.75 * report.saved_bytes
    (said,) = [text for text in report.advice if "compiled regions save them without a graph" in text]
    assert "`unprotected int8`" in said
    assert "recompute the modules" in said
    assert not any("a statistic, a mask or an index" in site.note for site in report.sites if site.site != "(top)[0]")
    for policy in ("unprotected int8", "* : recompute"):
        store = ActivationStore(model, policy, min_bytes=0)
        gradients(model, call, batch, store)
        report = store.report()
        assert report.held_bytes < 0.5 * report.saved_bytes
        assert not any("compiled regions save them" in text for text in report.advice)
    plain = nn.Sequential(Block(breaks=False), nn.Linear(64, 4))
    store = ActivationStore(plain, "int8", min_bytes=0)
    gradients(plain, plain, batch, store)
    assert {site.note for site in store.report().sites if site.site == "0.up[0]"} == {
        "kept: requires no gradient: a statistic, a mask or an index"  # the batch
    }


def test_compiled_calls_are_given_back():
    model, _ = build("blocks", "eager")
    calls = [block._compiled_call_impl for block in model[:2]]
    batch, first, second = (torch.randn(2, 64),), ActivationStore(model, "raw"), ActivationStore(model, "raw")
    with pytest.raises(ValueError, match="mine"), first:
        raise ValueError("mine")
    with first, second:
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert all(block._compiled_call_impl is not call for block, call in zip(model[:2], calls, strict=True))
        model[1].compile(backend="aot_eager")
        again = model[1]._compiled_call_impl
    assert model[0]._compiled_call_impl is calls[0]
    assert model[1]._compiled_call_impl is again
    for twin in twins:
        check_same(train_step(twin, batch).loss, train_step(model, batch).loss)


def test_the_store_itself_is_not_compiled():
    """What it does between compiled regions would be traced, too, and again for each step."""
    from torch._dynamo.utils import counters

    model, call = build("breaks", "eager")
    store = ActivationStore(model, "0 : recompute(raw); * : raw", min_bytes=0)
    batch = (torch.randn(4, 64),)
    for _ in range(2):
        gradients(model, call, batch, store)
    before = counters["frames"]["total"]
    for _ in range(3):
        gradients(model, call, batch, store)
    assert counters["frames"]["total"] == before
    assert before > 0
