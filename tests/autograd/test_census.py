"""Bytes as an equation: what is reported as saved is what autograd saves, counted by hooks that are not ours."""

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.session.entries import entries as store_entries
from tests.autograd.checks import Census, check_drained, gc_off, train_step
from tests.autograd.models import AUTOCAST, CASES, LOSSLESS, build, policy_of


def census_of(model, batch, *, autocast=False):
    census = Census(model)
    torch.manual_seed(1)
    with census.hooks(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(*batch).float().square().mean()
    assert loss.requires_grad
    return census.nbytes


@pytest.mark.parametrize("decision", [*LOSSLESS, "int8", "int8 @ disk", "recompute(int8)"])
@pytest.mark.parametrize(
    ("name", "autocast"),
    [*((name, False) for name in CASES), *((name, True) for name in AUTOCAST)],
    ids=[*(f"{name}-float32" for name in CASES), *(f"{name}-autocast" for name in AUTOCAST)],
)
def test_saved_bytes_are_those_of_the_census(name, decision, autocast):
    model, batch = build(name)
    wanted = census_of(model, batch, autocast=autocast)
    store = ActivationStore(model, policy_of(name, decision), min_bytes=0)
    train_step(model, batch, store, autocast=autocast)
    assert store.report().saved_bytes == wanted


@pytest.mark.parametrize("min_bytes", [0, 300, 1000, 10**9])
@pytest.mark.parametrize("policy", ["keep", "raw", "blocks.0 : keep; blocks.1 : raw", "*.norm1 : raw; head : int8"])
def test_saved_bytes_do_not_depend_on_where_tensors_wait(policy, min_bytes):
    model, batch = build("transformer")
    store = ActivationStore(model, policy, min_bytes=min_bytes)
    train_step(model, batch, store)
    assert store.report().saved_bytes == census_of(model, batch)


@pytest.mark.parametrize("policy", ["a : keep; b : raw", "a : raw; b : keep"])
def test_one_tensor_under_two_decisions_is_counted_once(policy):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    x = torch.randn(4, 8, requires_grad=True)
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        with store:
            y = model["a"](x) + model["b"](x)
        assert store.report().saved_bytes == x.nbytes
        del y
        check_drained(store)


@pytest.mark.parametrize("decision", ["keep", "raw", "raw @ disk"])
def test_what_dies_during_forward_was_saved_all_the_same(decision):
    store = ActivationStore(policy=decision, min_bytes=0)
    with gc_off(), store:
        for _ in range(8):
            x = torch.randn(100, requires_grad=True)
            y = x * x
            del x, y
    assert store.report().saved_bytes == 800 * 4
    assert store.report().live_bytes == 0


def test_small_tensors_of_many_calls_are_held_until_the_last_of_them_dies():
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    store = ActivationStore(model, "keep", min_bytes=0)
    with gc_off():
        with store:
            graphs = [layer(x if i % 2 else y) for i, layer in enumerate([*model, *model])]
        assert store.report().saved_bytes == x.nbytes + y.nbytes
        held = []
        while graphs:
            held.append(store.report().live_bytes)
            graphs.pop(0)
        assert held == [x.nbytes + y.nbytes] * 7 + [x.nbytes]
        check_drained(store)


@pytest.mark.parametrize("policy", ["a : keep; b : int8", "a : int8; b : keep"])
def test_a_tensor_that_is_kept_for_two_reasons_is_held_once(policy):
    """By the small tensors of a call, and alone, because a codec does not take it."""
    model = nn.ModuleDict({"a": nn.Linear(8, 8).double(), "b": nn.Linear(8, 8).double()})
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        with store:
            first, second = model["a"](x), model["b"](x)
        report = store.report()
        assert report.saved_bytes == report.held_bytes == report.live_bytes == x.nbytes
        del first
        assert store.report().live_bytes == x.nbytes
        del second
        check_drained(store)


def test_a_context_without_an_end_forgets_small_tensors():
    store = ActivationStore(policy="keep", min_bytes=0)
    with gc_off(), store:
        for _ in range(5000):
            x = torch.randn(4, requires_grad=True)
            (x * x).sum().backward()
        storages = store_entries()[-1].scope.storages
        assert len(storages.met) < 3000
        assert len(storages._held) < 3000
    assert store.report().saved_bytes == 5000 * x.nbytes


@pytest.mark.parametrize("policy", ["keep", "raw"])
def test_no_weak_reference_of_a_storage_is_left(policy, identified):
    """Of small tensors that are saved once, several times, and by several calls, and of weights of no model."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    weight = torch.randn(8, requires_grad=True)
    store = ActivationStore(model, policy, min_bytes=1000)
    with gc_off():
        with store:
            x = model(torch.randn(4, 8))
            loss = (x * x * x * weight * weight).sum() + nn.functional.layer_norm(x, (8,), nn.Parameter(weight)).sum()
            assert +identified
        loss.backward()
    assert not +identified
    assert min(identified.values()) == 0


@pytest.mark.parametrize("decision", ["keep", "raw"])
def test_a_small_tensor_that_outlives_the_frame_that_saved_it_first_is_still_held(decision):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    x = torch.randn(4, 8, requires_grad=True)
    store = ActivationStore(model, decision, min_bytes=0)
    with gc_off():
        with store:
            first, second = model["a"](x), model["b"](x)
        del first
        assert store.report().live_bytes == x.nbytes
        del second
        check_drained(store)


@pytest.mark.parametrize("decision", LOSSLESS)
@pytest.mark.parametrize("name", CASES)
def test_sites_add_up_to_the_totals(name, decision):
    model, batch = build(name)
    store = ActivationStore(model, policy_of(name, decision), min_bytes=0)
    with store:
        loss = model(*batch).square().mean()
    report = store.report()
    for figure in ("saved_bytes", "stored_bytes", "held_bytes", "live_bytes"):
        assert getattr(report, figure) == sum(getattr(site, figure) for site in report.sites)
        assert all(getattr(site, figure) >= 0 for site in report.sites)
    assert report.held_bytes <= report.peak_held_bytes
    assert report.held_bytes <= report.live_bytes
    if decision in ("keep", "raw", "raw @ host"):
        assert report.live_bytes == report.held_bytes
    if decision == "keep":
        assert report.held_bytes == report.saved_bytes == report.peak_held_bytes
    loss.backward()


@pytest.mark.parametrize("policy", ["raw", "raw @ host", "raw @ disk"])
def test_a_raw_payload_has_the_bytes_of_its_storage(policy):
    store = ActivationStore(policy=policy, min_bytes=0)
    x = torch.randn(1000, requires_grad=True)
    with store:
        y = (x * x).exp()
    report = store.report()
    assert report.saved_bytes == report.stored_bytes == 8000  # x and the output of exp
    del y


def test_int8_payloads_are_a_quarter_and_the_scales():
    store = ActivationStore(policy="int8", min_bytes=0)
    x = torch.randn(1024, requires_grad=True)
    with store:
        y = (x * x).sum()
    assert store.report().stored_bytes == 1024 + 2 * 8
    y.backward()
