"""What a store says of itself, and copies of it: new stores with the same arguments."""

import copy
import pickle

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Disk, Encode, Rules, SampleErrors, Trace, Verify, Window
from actstore.codecs import Int8

pytestmark = pytest.mark.filterwarnings("ignore:the disk tier's folder:RuntimeWarning")


def make_model():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def gradients(model, store):
    torch.manual_seed(0)
    model.zero_grad()
    with store:
        loss = model(torch.randn(64, 8)).square().sum()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda store: pickle.loads(pickle.dumps(store))}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_a_new_store_with_the_same_arguments(way, tmp_path):
    model = make_model()
    observe = [SampleErrors(every=1, warn=0.9), Trace(limit=50), Verify()]
    tiers = [Disk(tmp_path, "1MiB"), Window("64KiB", when_full="keep")]
    store = ActivationStore(
        model, "0 : int4(round=stochastic) @ disk; * : keep", tiers=tiers, observe=observe, min_bytes=0, seed=5
    )
    wanted = gradients(model, store)
    other = WAYS[way](store)
    assert (other.model is model) == (way == "copy")
    assert other.policy == store.policy
    assert other.report().saved_bytes == 0
    assert other.trace is not store.trace
    assert (other.trace.limit, len(other.trace)) == (50, 0)
    found = gradients(other.model, other)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    store.close()
    gradients(other.model, other)
    other.close()


def test_an_entered_store_is_copied_as_it_was_made():
    model = make_model()
    store = ActivationStore(model, Rules([], default=Encode(Int8())), min_bytes=0)
    with store:
        inner = copy.copy(store)
        loss = model(torch.randn(64, 8)).sum()
    loss.backward()
    assert inner.report().saved_bytes == 0


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("0 : int8;\n  * : keep", "'0 : int8; * : keep'"),
        (Rules.parse("0 : int8"), "'0 : int8; * : keep'"),
        (Encode(Int8()), "'int8'"),
        ("auto(1MiB)", "'auto(1MiB)'"),
    ],
)
def test_a_store_tells_its_model_policy_and_state(policy, text):
    model = make_model()
    store = ActivationStore(model, policy, min_bytes=0)
    assert repr(store) == f"<ActivationStore of Sequential: {text}, 0 steps>"
    with store:
        assert repr(store).endswith(", entered>")
        loss = model(torch.randn(64, 8)).sum()
    loss.backward()
    assert repr(store).endswith(", 1 steps>")
    store.close()
    assert repr(store).endswith(", closed>")


def test_a_store_without_a_model_or_with_a_function_tells_that():
    assert repr(ActivationStore(policy="int8")) == "<ActivationStore: 'int8', 0 steps>"

    def mine(site, spec):
        return Encode(Int8())

    assert "mine" in repr(ActivationStore(policy=mine))
