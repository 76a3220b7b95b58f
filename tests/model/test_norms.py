"""Running statistics that a recomputed region reads: those of its first run."""

import copy

import pytest
import torch
from torch import nn
from torch.ao.nn.intrinsic.qat import ConvBn2d
from torch.ao.quantization import get_default_qat_qconfig

from actstore import ActivationStore
from actstore.model.norms import NormStatistics, give_back
from tests.autograd.checks import check_same, train_step
from tests.autograd.models import WIDTH

RECOMPUTE = ["recompute", "recompute(raw @ disk)", "recompute(segment=2)"]


class Reading(nn.Module):
    """Runs `function` of a layer, a norm and the input."""

    def __init__(self, function, norm=nn.BatchNorm1d):
        super().__init__()
        self.inner, self.norm, self.function = nn.Linear(WIDTH, WIDTH), norm(WIDTH), function

    def forward(self, x):
        return torch.tanh(self.function(self.norm, self.inner(x)))


def reads_before(norm, x):
    scale, shift, count = norm.running_var.clone(), norm.running_mean.clone(), norm.num_batches_tracked.clone()
    return norm(x) * scale + shift / (1 + count)


def reads_both(norm, x):
    before = norm.running_var * 1
    return norm(x) * (before + norm.running_var.detach().clone())


def eval_then_train(norm, x):
    y = norm.eval()(x).tanh()
    return norm.train()(y)


def train_then_eval(norm, x):
    y = norm.train()(x).tanh()
    return norm.eval()(y * 2)


def renormalized(norm, x):
    """Batch renormalisation: corrected by the running statistics from before the batch."""
    mean, deviation = norm.running_mean.clone(), norm.running_var.sqrt()
    r = (x.detach().std(0, correction=0) / deviation).clamp(1 / 3, 3)
    return norm(x) * r + ((x.detach().mean(0) - mean) / deviation).clamp(-5, 5)


class Counting(nn.BatchNorm1d):
    """A norm with buffers of its own, one of which it replaces and one of which it writes to."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("seen", torch.ones(()))
        self.register_buffer("largest", torch.zeros(width))

    def forward(self, x):
        self.seen = self.seen + 1
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().amax(0)))
        return super().forward(x) * self.seen / (1 + self.largest.clone())


READERS = [reads_before, reads_both, eval_then_train, train_then_eval, renormalized]


def check_as_plain(model, decision="recompute"):
    plain = copy.deepcopy(model)
    store = ActivationStore(model, f"[0-9] : {decision}", min_bytes=0)
    for seed in range(3):
        batch = (torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed)),)
        check_same(train_step(model, batch, store), train_step(plain, batch))
        check_same(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("decision", RECOMPUTE)
def test_statistics_that_a_region_reads_are_those_of_its_first_run(decision, reader):
    torch.manual_seed(0)
    check_as_plain(nn.Sequential(*(Reading(reader) for _ in range(3))), decision)


@pytest.mark.parametrize("norm", [Counting, lambda width: nn.BatchNorm1d(width, momentum=None)])
def test_norms_with_other_buffers_and_momentums(norm):
    def reads(norm, x):
        return norm(x) + norm.running_mean

    torch.manual_seed(0)
    check_as_plain(nn.Sequential(Reading(reads, norm), Reading(reads, norm)))


def test_a_region_that_runs_again_inside_of_another_one_has_its_own():
    """Each of two calls has the statistics that it found, also where one runs again for the other's input."""
    torch.manual_seed(0)
    model, x = nn.ModuleList([Reading(reads_before)]), torch.randn(6, WIDTH)
    plain = copy.deepcopy(model)

    def loss_of(model):
        y = x
        for _ in range(4):
            y = model[0](y)
        return y.square().sum()

    with ActivationStore(model, "0 : recompute(schedule=revolve, slots=1)", min_bytes=0):
        loss = loss_of(model)
    wanted = loss_of(plain)
    check_same(
        torch.autograd.grad(loss, list(model.parameters())), torch.autograd.grad(wanted, list(plain.parameters()))
    )
    check_same(list(model.buffers()), list(plain.buffers()))


def test_a_norm_that_two_second_runs_have_has_the_copies_of_the_inner_one_and_then_of_the_outer():
    norm = nn.BatchNorm1d(2)
    own, calls = norm.running_mean, []
    for value in (1.0, 2.0):
        norm.running_mean.fill_(value)
        calls.append(NormStatistics([norm]))
    norm.running_mean.fill_(3.0)
    outer = calls[0].lend()
    inner = calls[1].lend()
    assert norm.running_mean[0] == 2
    give_back(inner)
    assert norm.running_mean[0] == 1
    give_back(outer)
    assert norm.running_mean is own
    assert own[0] == 3


def test_statistics_of_two_norms_that_are_one_stay_one():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.first, self.second = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
            self.second.running_var = self.first.running_var

        def forward(self, x):
            y = self.first(self.inner(x))
            return torch.tanh(self.second(y) * self.second.running_var.clone())

    torch.manual_seed(0)
    check_as_plain(nn.Sequential(Both()))


def test_convolutions_that_are_quantization_aware():
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, 32)
            self.conv = ConvBn2d(2, 4, 1, qconfig=get_default_qat_qconfig("fbgemm"))
            self.last = nn.Linear(64, WIDTH)

        def forward(self, x):
            return torch.tanh(self.last(self.conv(self.inner(x).view(-1, 2, 4, 4)).flatten(1)))

    torch.manual_seed(0)
    check_as_plain(nn.Sequential(Quantized(), Quantized()))
