"""The parts of a fit's peak: weights, gradients, optimizer, logits, payloads, activations and working."""

import gc
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore, fit_step
from actstore.devices import cpu_memory
from tests.inspection.steps_to_fit import Mlp, make_mlp

pytestmark = pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")


def test_bytes_at_the_peak_have_names():
    row = fit_step(make_mlp, []).rows[0]
    weights = 4 * (2 * 512 * 2048 + 512 + 2048)
    assert row.at_peak["weights"] == weights
    assert row.at_peak["optimizer"] == 2 * weights + 4 * 4  # and a counter for each weight
    assert row.at_peak["activations"] == 4 * 2048 * (512 + 2 * 2048)  # the input, and the hidden values twice
    assert sum(row.at_peak.values()) == row.peak_bytes
    assert row.largest == "activations"
    assert "optimizer" not in fit_step(make_mlp, [], make_optimizer=None).rows[0].at_peak


def test_logits_have_a_name_of_their_own():
    def make_step():
        head = nn.Linear(64, 50_000)
        x, y = torch.ones(512, 64), torch.zeros(512, dtype=torch.long)
        return head, lambda: F.cross_entropy(head(x), y)

    row = fit_step(make_step, []).rows[0]
    assert row.largest == "logits"
    assert row.at_peak["logits"] >= 2 * 4 * 512 * 50_000  # the logarithms of the probabilities, and their gradient


def test_a_step_may_train_by_itself_and_enter_the_store():
    def make_step(batch=2048):
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        x = torch.ones(batch, 512)

        def step(store):
            optimizer.zero_grad()
            with store:
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        return model, step

    rows = fit_step(make_step, ["int8"]).rows
    weights = rows[0].at_peak["weights"]
    assert all(row.at_peak["optimizer"] == weights for row in rows)
    assert 0 < rows[1].at_peak["payloads"] < (512 + 2 * 2048) * 2048 * 1.1  # a byte for each saved value, and scales


class PeaksInside(nn.Module):
    """Module that saves tensors of half a MiB, and then needs much more for a moment."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        x = self.linear(x)
        for _ in range(8):
            x = x.sin()
        torch.empty(16 << 20)
        return x


def make_peak_inside():
    model, x = PeaksInside(), torch.ones(2048, 64)
    return model, lambda: model(x).sum()


def make_backward_inside():
    model, step = make_mlp()

    def whole(store):
        with store:
            step().backward()

    return model, whole


@pytest.mark.parametrize("make_step", [make_mlp, make_peak_inside, make_backward_inside])
def test_what_a_store_keeps_are_activations(make_step):
    plain, keep = fit_step(make_step, ["keep"]).rows
    assert keep.at_peak == plain.at_peak
    assert keep.at_peak["activations"] >= 8 << 19


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x):
        hidden = self.linear(x)
        return hidden.sin() * hidden.cos()


@pytest.mark.parametrize("policy", ["nf4", "int8"])  # in nf4, zeros are other bytes than those of an unwritten payload
def test_payloads_that_serve_twice_count_once(policy):
    def make_step():
        model, x = Twice(), torch.ones(2048, 512)
        return model, lambda: model(x).sum()

    assert fit_step(make_step, [policy]).rows[1].at_peak["payloads"] == measured_payloads(make_step, policy)


def measured_payloads(make_step, policy):
    model, step = make_step()
    with closing(ActivationStore(model, policy)) as store:
        for _ in range(2):
            with store:
                loss = step()
            stored = store.report().stored_bytes
            loss.backward()
        return stored


def test_an_optimizer_that_gc_freeze_has_hidden_is_counted():
    def make_step():
        model, run = make_mlp(device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        gc.freeze()

        def step():
            run().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    row = fit_step(make_step, []).rows[0]
    assert row.at_peak["optimizer"] == row.at_peak["weights"]
