"""A lossless store gives the loss and every gradient of plain autograd, bit for bit, and has acted."""

import pytest
import torch

from actstore import ActivationStore
from tests.autograd.checks import check_drained, check_same, gc_off, train_step
from tests.autograd.models import AUTOCAST, CASES, LOSSLESS, build, policy_of

DECISIONS = [pytest.param(decision, id=decision.replace(" ", "")) for decision in LOSSLESS]


def store_for(name, model, decision):
    return ActivationStore(model, policy_of(name, decision), min_bytes=0)


def check_acted(report, decision, masks=False):
    assert report.saved_bytes > 0
    if decision == "derive" and masks:
        assert 0 < report.stored_bytes < report.saved_bytes / 32  # one bit an element
    elif decision in ("keep", "recompute", "derive"):
        assert report.stored_bytes == 0
    else:
        assert report.stored_bytes > 0


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_two_steps_are_those_of_plain_autograd(name, decision, inside):
    model, batch = build(name)
    twin, _ = build(name)
    store = store_for(name, model, decision)
    with gc_off():
        for seed in (1, 2):  # BatchNorm's running statistics change in between, on both sides
            found = train_step(model, batch, store, seed=seed, inside=inside)
            check_same(found, train_step(twin, batch, seed=seed))
            check_acted(store.report(), decision, name == "dropout")
            check_drained(store)


@pytest.mark.parametrize("decision", DECISIONS)
def test_running_statistics(decision):
    model, batch = build("conv")
    twin, _ = build("conv")
    train_step(model, batch, store_for("conv", model, decision))
    train_step(twin, batch)
    check_same(dict(model.named_buffers()), dict(twin.named_buffers()))


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "float64") for name in CASES), *((name, "autocast") for name in AUTOCAST)],
)
def test_dtypes(name, kind, decision):
    dtype, autocast = (torch.float64, False) if kind == "float64" else (torch.float32, True)
    model, batch = build(name, dtype)
    twin, _ = build(name, dtype)
    store = store_for(name, model, decision)
    with gc_off():
        found = train_step(model, batch, store, autocast=autocast)
        check_acted(store.report(), decision, name == "dropout")
        check_drained(store)
    check_same(found, train_step(twin, batch, autocast=autocast))


@pytest.mark.parametrize("decision", DECISIONS)
def test_an_optimizer_walks_the_same_way(decision):
    model, batch = build("transformer")
    twin, _ = build("transformer")
    store = store_for("transformer", model, decision)
    for one, with_store in ((model, store), (twin, None)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        for seed in range(4):
            train_step(one, batch, with_store, seed=seed)
            optimizer.step()
    check_same(dict(model.named_parameters()), dict(twin.named_parameters()))


@pytest.mark.parametrize("decision", DECISIONS)
def test_accumulated_gradients(decision):
    model, batch = build("mlp")
    store = store_for("mlp", model, decision)
    wanted, found = {}, {}
    for grads, entered in ((wanted, None), (found, store)):
        model.zero_grad()
        for scale in (1.0, 0.5, 2.0):
            if entered is None:
                loss = model(batch[0] * scale).square().mean()
            else:
                with entered:
                    loss = model(batch[0] * scale).square().mean()
            loss.backward()
        grads.update({name: p.grad.clone() for name, p in model.named_parameters()})
    check_same(found, wanted)


@pytest.mark.parametrize("min_bytes", [0, 200, "0.5KiB", "1GiB"])
@pytest.mark.parametrize("decision", ["keep", "raw", "raw @ disk", "int8"])
def test_what_is_smaller_than_min_bytes_is_kept(decision, min_bytes):
    model, batch = build("mlp")
    store = ActivationStore(model, decision, min_bytes=min_bytes)
    found = train_step(model, batch, store)
    if decision != "int8" or min_bytes == "1GiB":
        check_same(found, train_step(model, batch))
    acted = decision != "keep" and min_bytes != "1GiB"
    assert (store.report().stored_bytes > 0) == acted


def test_evaluation_stores_nothing():
    model, batch = build("conv")
    store = ActivationStore(model, "raw", min_bytes=0)
    model.eval()
    with torch.no_grad(), store:
        found = model(*batch)
        check_same(found, model(*batch))
    assert store.report().saved_bytes == store.report().stored_bytes == 0
