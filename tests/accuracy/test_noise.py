"""The noise of gradients from batch to batch, against its definition."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Encode, SampleErrors
from actstore.accuracy.influence.batch_noise import SAMPLE_NUMEL, Minibatch, sample
from actstore.base.ledger import Ledger
from actstore.codecs import Int8
from tests.system.interrupts import Moments, in_package


def linear(inputs=8, outputs=4):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs), torch.randn(6, 16, inputs), torch.randn(6, 16, outputs)


def gradients(model, x, c):
    found = torch.autograd.grad((model(x) * c).sum(), list(model.parameters()))
    return torch.cat([g.flatten() for g in found]).double()


def test_it_is_half_the_squared_difference():
    model, x, c = linear()
    noise = Minibatch(Ledger())
    noise.begin(model)
    (model(x[0]) * c[0]).sum().backward()
    assert noise.read()[1] is None
    noise.follow(model)
    (model(x[1]) * c[1]).sum().backward()  # accumulates
    first, second = gradients(model, x[0], c[0]), gradients(model, x[1], c[1])
    square, variance = noise.read()
    assert square == pytest.approx(first.square().sum().item(), rel=1e-5)
    assert variance == pytest.approx((first - second).square().sum().item() / 2, rel=1e-5)


def test_steps_that_follow_change_nothing():
    model, x, c = linear()
    noise = Minibatch(Ledger())
    noise.begin(model)
    (model(x[0]) * c[0]).sum().backward()
    found = []
    for i in range(1, 4):
        noise.follow(model)
        assert bool(model.weight._backward_hooks) == (i == 1)
        (model(x[i]) * c[i]).sum().backward()
        assert not model.weight._backward_hooks
        found.append(noise.read())
    assert found[0] == found[1] == found[2]


def test_an_interrupt_at_each_moment_of_a_backward_leaves_no_hook():
    """What takes the gradient of a weight has taken its hook away, or `stop` does."""
    model, x, c = linear()

    def backward(at):
        noise = Minibatch(Ledger())
        noise.begin(model)
        loss = (model(x[0]) * c[0]).sum()
        with suppress(KeyboardInterrupt), Moments(in_package, at) as moments:
            loss.backward()
        noise.stop()
        assert not any(weight._backward_hooks for weight in model.parameters())
        return moments.count

    count = backward(None)
    assert count > 20
    for at in range(1, count + 1):
        backward(at)


def test_its_mean_is_the_variance():
    """Of many pairs of batches drawn alike, the mean is the variance of the gradients."""
    model, _, _ = linear()
    generator = torch.Generator().manual_seed(1)
    seen, found = [], []
    for _ in range(200):
        noise = Minibatch(Ledger())
        noise.begin(model)
        for turn in range(2):
            x, c = torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)
            seen.append(gradients(model, x, c))
            if turn:
                noise.follow(model)
            (model(x) * c).sum().backward()
        found.append(noise.read()[1])
    variance = torch.stack(seen).var(0).sum().item()
    assert sum(found) / len(found) == pytest.approx(variance, rel=0.05)


@pytest.mark.parametrize("numel", [0, 1, SAMPLE_NUMEL - 1, SAMPLE_NUMEL, SAMPLE_NUMEL + 1, 3 * SAMPLE_NUMEL + 7])
def test_a_sample_is_small_and_evenly_spaced(numel):
    values = torch.arange(numel, dtype=torch.float64)
    taken = sample(values)
    assert taken.dtype is torch.float32
    assert min(numel, SAMPLE_NUMEL // 2) <= len(taken) <= SAMPLE_NUMEL
    if len(taken) > 1:
        assert len(set(taken.diff().tolist())) == 1
    taken.zero_()
    assert values.sum() == numel * (numel - 1) / 2


def test_a_large_weight_counts_by_its_size():
    torch.manual_seed(0)
    model, noise = nn.Linear(700, 400, bias=False), Minibatch(Ledger())
    found = []
    for turn in range(2):
        noise.follow(model) if turn else noise.begin(model)
        x, c = torch.randn(700, 700), torch.randn(700, 400)
        found.append(gradients(model, x, c))
        (model(x) * c).sum().backward()
    expected = (found[0] - found[1]).square().sum().item() / 2
    assert noise.read()[1] == pytest.approx(expected, rel=0.02)


def test_weights_without_a_gradient_are_left_out():
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3), "frozen": nn.Linear(3, 3)})
    model["frozen"].requires_grad_(False)
    noise = Minibatch(Ledger())
    noise.begin(model)
    model["used"](torch.ones(2, 3)).sum().backward()
    assert not model["frozen"].weight._backward_hooks
    assert noise.read()[0] > 0
    noise.stop()
    assert not any(p._backward_hooks for p in model.parameters())


def test_sparse_gradients_are_left_out():
    model, noise = nn.Embedding(5, 3, sparse=True), Minibatch(Ledger())
    for turn in range(2):
        noise.follow(model) if turn else noise.begin(model)
        model(torch.tensor([1, 2])).sum().backward()
    assert noise.read() == (0.0, None)


def test_batched_gradients_are_left_out():
    _, x, _ = linear()
    model, vectors = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(3, 16, 4)
    weights = list(model.parameters())
    store = ActivationStore(model, "int8", min_bytes=0, observe=[SampleErrors(every=1)])
    expected = torch.autograd.grad(model(x[0]), weights, vectors, is_grads_batched=True)
    with store:
        y = model(x[0])
    found = torch.autograd.grad(y, weights, vectors, is_grads_batched=True)
    for mine, plain in zip(found, expected, strict=True):
        assert (mine - plain).norm() < 0.02 * plain.norm()
    assert store.report().lossy


def test_a_step_that_is_looked_at_is_compared_with_the_one_before_and_then_with_the_one_after():
    model, x, c = linear()
    half, turns = [], [Minibatch(Ledger())]
    for i in range(3):
        if i:
            turns.append(turns[-1].following())
        turns[-1].begin(model)
        (model(x[i]) * c[i]).sum().backward()
        if i:
            pair = gradients(model, x[i - 1], c[i - 1]) - gradients(model, x[i], c[i])
            half.append(pytest.approx(pair.square().sum().item() / 2, rel=1e-5))
    assert [turn.read()[1] for turn in turns] == [half[0], half[1], half[1]]
    turns[-1].follow(model)
    (model(x[3]) * c[3]).sum().backward()
    assert turns[-1].read()[1] != half[1]
    turns[-1].follow(model)
    assert [turn.ready() for turn in turns] == [True, True, True]


def test_a_step_that_follows_another_is_not_the_first_one_s_second_batch():
    """Sampled, not, sampled: the first two are a pair, and the third waits for one."""
    model, x, c = linear()
    first = Minibatch(Ledger())
    first.begin(model)
    (model(x[0]) * c[0]).sum().backward()
    first.follow(model)
    (model(x[1]) * c[1]).sum().backward()
    found = first.read()
    third = first.following()
    third.begin(model)
    (model(x[2]) * c[2]).sum().backward()
    assert third.read()[1] is None
    assert first.read() == found


def test_samples_are_booked_until_they_are_compared():
    model, _, _ = linear(700, 400)
    ledger = Ledger()
    noise = Minibatch(ledger)
    noise.begin(model)
    model(torch.randn(4, 700)).sum().backward()
    nbytes = sum(sample(weight).nbytes for weight in model.parameters())
    assert ledger.peak == nbytes <= 4 * 2 * SAMPLE_NUMEL
    noise.follow(model)
    model(torch.randn(4, 700)).sum().backward()
    assert ledger.fits(0)
    ledger.start()  # books what has gone
    assert ledger.peak == 0


def test_there_are_no_samples_where_the_next_step_has_no_room_for_them():
    model, _, _ = linear(700, 400)
    ledger = Ledger()
    ledger.budget.set(2 * SAMPLE_NUMEL)
    noise = Minibatch(ledger)
    noise.begin(model)
    model(torch.randn(4, 700)).sum().backward()
    noise.follow(model)
    assert not any(weight._backward_hooks for weight in model.parameters())
    square, variance = noise.read()
    assert square > 0
    assert variance is None
    ledger.start()
    assert ledger.peak == 0


def test_a_store_has_it_after_the_step_that_follows():
    model, x, c = linear()
    store = ActivationStore(model, Encode(Int8(), protected=False), min_bytes=0, observe=[SampleErrors(every=200)])
    for i in range(2):
        with store:
            out = model(x[i])
        (out * c[i]).sum().backward()
        effect = store.report().gradients
        assert effect is not None
        assert (effect.noise is None) == (i == 0)
    first, second = gradients(model, x[0], c[0]), gradients(model, x[1], c[1])
    expected = (first - second).square().sum() / 2 / first.square().sum()
    assert effect.noise == pytest.approx(expected.item(), rel=0.05)


def test_a_store_that_samples_each_step_has_it_from_the_second_on():
    model, x, c = linear()
    store = ActivationStore(model, Encode(Int8(), protected=False), min_bytes=0, observe=[SampleErrors(every=1)])
    for i in range(3):
        with store:
            out = model(x[i])
        (out * c[i]).sum().backward()
        effect = store.report().gradients
        assert (effect.noise is None) == (i == 0)
    before, last = (gradients(model, x[i], c[i]) for i in (1, 2))
    expected = (before - last).square().sum() / 2 / last.square().sum()
    assert effect.noise == pytest.approx(expected.item(), rel=0.05)
