"""Buffers and tensors in attributes that an excepted part changes: a second run reads what the first run read."""

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.errors import StateError
from tests.autograd.checks import check_drained, check_same
from tests.autograd.models import WIDTH


class Part(nn.Module):
    """Changes its state by `change`; the region around it reads that before and afterwards."""

    def __init__(self, change):
        super().__init__()
        self.change, self.calls = change, 0
        self.register_buffer("sum", torch.zeros(WIDTH))
        self.register_buffer("large", torch.zeros(2048))  # above 4 KiB
        self.mean = torch.zeros(WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def state(self):
        return self.sum + self.large[:WIDTH] + self.mean + self.norm.running_var + self.norm.num_batches_tracked

    def forward(self, x):
        self.calls += 1
        self.change(self, x.detach().mean(0))
        return torch.tanh(x)


class Region(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear, self.part = nn.Linear(WIDTH, WIDTH), Part(change)

    def forward(self, x):
        alias = self.part.sum
        before = self.part.state() + 1
        y = self.part(self.linear(x)) * before
        y = self.part(y * y) * self.part.state()
        return torch.tanh(y * self.part.state() + alias)


def nothing(part, mean):
    pass


def of_a_norm(part, mean):
    part.norm(torch.stack([mean, mean + 1]))


def in_place(part, mean):
    part.sum.add_(mean)
    part.mean.mul_(0.5).add_(mean)
    part.large[:WIDTH] += mean


def through_data(part, mean):
    part.sum.data.add_(mean)
    part.mean.data.add_(mean)


def replaced(part, mean):
    part.sum = part.sum + mean


CHANGES = [nothing, of_a_norm, in_place, through_data, replaced]
RULES = ["part : keep; * : recompute", "part : raw @ disk; * : recompute(raw @ disk)"]


def train(model, store, *, steps=3):
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(5, WIDTH, requires_grad=True)
        if store is None:
            loss = model(x).square().sum()
        else:
            with store:
                loss = model(x).square().sum()
        loss.backward()
        found += [loss.detach(), x.grad, *[each.grad.clone() for each in model.parameters() if each.grad is not None]]
        model.zero_grad()
    return [*found, *[each.clone() for each in model.buffers()], model[0].part.mean.clone()]


def made(change, training=True):
    torch.manual_seed(0)
    return nn.Sequential(Region(change)).train(training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_region_reads_what_the_part_changes(change, rules, training):
    wanted = train(made(change, training), None)
    model = made(change, training)
    with ActivationStore(model, rules.replace("part", "0.part").replace("*", "0"), min_bytes=0) as store:
        pass
    check_same(train(model, store), wanted)
    assert model[0].part.calls == 6
    check_drained(store)
    store.close()


def test_two_graphs_at_once_and_a_retained_one():
    def train(model, store):
        xs = [torch.full((5, WIDTH), i + 0.1 * torch.arange(WIDTH)[3], requires_grad=True) for i in range(2)]
        losses = []
        for x in xs:
            if store is None:
                losses.append(model(x).sum())
            else:
                with store:
                    losses.append(model(x).sum())
        pairs = [*zip(losses, xs, strict=True)] * 2
        grads = [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss, x in pairs]
        return [*losses, *grads, *model.buffers()]

    wanted = train(made(in_place), None)
    model = made(in_place)
    store = ActivationStore(model, "0.part : keep; 0 : recompute", min_bytes=0)
    check_same(train(model, store), wanted)


def test_a_large_buffer_that_is_first_written_in_a_later_call_is_not_read_as_it_is():
    """No copy of its values from before waits: the first call has not written to it."""

    def change(part, mean):
        if part.calls > 2:
            part.large[:WIDTH] += mean

    model = made(change)
    store = ActivationStore(model, "0.part : keep; 0 : recompute", min_bytes=0)
    with pytest.raises(StateError, match=r"attribute=Part\.large: a recomputed region must not read"):
        train(model, store)
