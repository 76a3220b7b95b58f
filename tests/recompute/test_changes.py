"""What is changed in place between forward and backward, which would run again with other values."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore
from actstore.errors import MutationError
from tests.autograd.checks import check_same
from tests.autograd.models import WIDTH

RECOMPUTE = ["recompute", "recompute(raw @ disk)", "recompute(segment=2)", "recompute(schedule=revolve, slots=2)"]


def blocks(*parts):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(*(part() for part in parts)) for _ in range(3)))


def linear():
    return nn.Linear(WIDTH, WIDTH)


def loss_of(model, decision, x):
    if decision is None:
        return model(x).square().sum()
    with ActivationStore(model, f"[0-9] : {decision}", min_bytes=0):
        return model(x).square().sum()


def grads_of(model, decision, x, times=1):
    model.zero_grad()
    loss = loss_of(model, decision, x)
    for last in [*[False] * (times - 1), True]:
        loss.backward(retain_graph=not last)
    return {name: p.grad for name, p in model.named_parameters()}


def check_as_plain(model, decision, x, times=1):
    """Gradients, and what the modules hold afterwards."""
    plain = copy.deepcopy(model)
    for seed in range(2):
        torch.manual_seed(seed)
        found = grads_of(model, decision, x, times)
        torch.manual_seed(seed)
        check_same(found, grads_of(plain, None, x, times))
    check_same(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("decision", RECOMPUTE)
def test_a_step_between_forward_and_backward_is_refused(decision, autocast):
    """Under autocast plain PyTorch saves copies and is right; nobody could recompute these."""
    model, x = blocks(linear, nn.Tanh), torch.randn(5, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(model, decision, x)
        loss_of(model, None, x).backward()
    optimizer.step()
    with pytest.raises(
        MutationError, match=r"parameter 0\.weight of a Sequential .* version 2; expected version 1"
    ) as e:
        loss.backward()
    assert (e.value.name, e.value.expected, e.value.found) == ("0.weight", 1, 2)
    assert "recompute" in "".join(e.value.__notes__)
    model.zero_grad()
    check_as_plain(model, decision, x)  # nothing is left behind


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_a_step_after_each_of_two_backwards_is_not(decision):
    def train(decision):
        model, x = blocks(linear, nn.Tanh), torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
        for _ in range(2):
            optimizer.zero_grad()
            grads_of(model, decision, x, times=2)
            optimizer.step()
        return list(model.parameters())

    check_same(train(decision), train(None))


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_each_weight_may_step_once_its_gradient_is_there(decision):
    def train(decision):
        model, x = blocks(linear, nn.Tanh), torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: p.data.new_empty(0) if p.grad is None else step(p))
        for _ in range(2):
            loss_of(model, decision, x).backward()
        return list(model.parameters())

    @torch.no_grad()
    def step(p):
        p.sub_(0.1 * p.grad)
        p.grad = None

    check_same(train(decision), train(None))


class Limited(nn.Module):
    """Limits the norms of its weights before it uses them, and fills a table with the same values in each run."""

    def __init__(self):
        super().__init__()
        self.inner, self.rows = nn.Linear(WIDTH, WIDTH), nn.Embedding(4, WIDTH, max_norm=0.5)
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(WIDTH))

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.renorm_(2, 0, 0.5)
        self.table.copy_(torch.arange(WIDTH))
        return torch.tanh(self.inner(x) * self.table) + self.rows(torch.arange(4)).sum(0)


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_a_forward_may_write_to_its_own_weights_and_buffers(decision):
    check_as_plain(blocks(Limited), decision, torch.randn(5, WIDTH), times=3)


class Rows(nn.Module):
    """Of whose rows some are longer than the limit by rounding, once limited."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.rows = nn.Linear(WIDTH, WIDTH), kind(64, WIDTH, max_norm=0.3)

    def forward(self, x):
        rows = self.rows(torch.arange(64).view(64, 1)).view(64, WIDTH)
        return torch.tanh(self.inner(x) * rows.sum(0) + rows[:5] * rows[5:10].exp())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("decision", RECOMPUTE)
def test_rows_are_limited_once(decision, kind):
    model = blocks(lambda: Rows(kind))
    weights = [block[0].rows.weight.clone() for block in model]
    check_as_plain(model, decision, torch.randn(5, WIDTH), times=3)
    plain = blocks(lambda: Rows(kind))
    for _ in range(2):
        plain(torch.randn(5, WIDTH))
    for block, other, first in zip(model, plain, weights, strict=True):
        check_same(block[0].rows.weight, other[0].rows.weight)
        assert block[0].rows.max_norm == 0.3
        assert not torch.equal(first, other[0].rows.weight)
    loss = loss_of(model, decision, torch.randn(5, WIDTH))
    model(torch.randn(5, WIDTH))  # limits them once more
    with pytest.raises(MutationError, match=r"parameter 0\.rows\.weight"):
        loss.backward()


class Counts(nn.Module):
    """Counts its runs in a buffer that autograd does not save."""

    def __init__(self):
        super().__init__()
        self.runs: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.register_buffer("unused", torch.eye(WIDTH).to_sparse())  # has no storage

    def forward(self, x):
        return x * self.scale + 0 * self.runs


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_a_buffer_that_autograd_saved_may_not_change_and_another_may(decision):
    model, x = blocks(linear, Counts), torch.randn(5, WIDTH)
    losses = [loss_of(model, way, x) for way in (None, decision)]
    for block in model:
        block[1].runs.add_(1)
    (wanted, found) = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    check_same(found, wanted)
    model[0][1].scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()
    with pytest.raises(MutationError, match=r"weight or buffer 1\.scale of a Sequential"):
        losses[1].backward()


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_running_statistics_may_move_in_training_but_not_in_evaluation(decision):
    model, x = blocks(linear, lambda: nn.BatchNorm1d(WIDTH)), torch.randn(5, WIDTH)
    check_as_plain(model, decision, x)
    losses = [loss_of(model, way, x) for way in (None, decision)]
    model(2 * x)
    (wanted, found) = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    check_same(found, wanted)

    check_as_plain(model.eval(), decision, x)
    loss = loss_of(model, decision, x)
    model.train()(x)
    model.eval()
    with pytest.raises(MutationError, match=r"1\.num_batches_tracked"):
        loss.backward()
    for block in model:
        del block[1].num_batches_tracked  # as some loaders of old checkpoints do
    check_as_plain(model, decision, x)


def hooked(norm):
    def part():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch would rather have its successor used
            return norm(linear())

    return part


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("where", ["[0-9]", "*.0"])
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("decision", RECOMPUTE)
def test_weights_that_a_hook_computes_are_those_of_the_first_run(decision, norm, where, training):
    model, plain = (blocks(hooked(norm), nn.Tanh).train(training) for _ in range(2))
    x = torch.randn(5, WIDTH)
    store = ActivationStore(model, f"{where} : {decision}", min_bytes=0)
    for _ in range(2):
        with store:
            loss = model(x).square().sum() - model(0.5 * x).square().sum()
        wanted = plain(x).square().sum() - plain(0.5 * x).square().sum()
        for again in (True, False):
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=again)
            check_same(found, torch.autograd.grad(wanted, list(plain.parameters()), retain_graph=again))
    check_same(dict(model.named_buffers()), dict(plain.named_buffers()))
    del loss, found
    gc.collect()
    assert store.report().live_bytes == 0
    store.close()


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_noise_that_is_saved_before_it_is_drawn_may_come_last(decision):
    check_as_plain(blocks(linear, nn.RReLU), decision, torch.randn(5, WIDTH), times=2)


class Leaks(nn.Module):
    """Ends in RReLU without a module for it."""

    def __init__(self, inplace, after):
        super().__init__()
        self.inner, self.inplace, self.after = linear(), inplace, after

    def forward(self, x):
        y = F.rrelu(self.inner(x), training=True, inplace=self.inplace)
        return y + self.after if self.after else y


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("decision", RECOMPUTE)
def test_noise_of_a_function_may_come_last(decision, inplace, after):
    check_as_plain(blocks(lambda: Leaks(inplace, after)), decision, torch.randn(5, WIDTH), times=2)


@pytest.mark.parametrize("part", [nn.RReLU, lambda: Leaks(False, 0)], ids=["module", "function"])
def test_noise_that_comes_last_is_drawn_where_decisions_are_repeated(part):
    """The numbers of the first run; inputs that int8 moves take the side that they were on."""
    model, x = blocks(linear, part), torch.randn(64, WIDTH)
    torch.manual_seed(1)
    found = grads_of(model, "recompute(int8)", x)
    torch.manual_seed(1)
    wanted = grads_of(model, None, x)
    for name, grad in wanted.items():
        assert (found[name] - grad).norm() < 0.05 * grad.norm()


class Drops(nn.Module):
    def forward(self, x, generator):
        return torch.tanh(x * torch.rand(x.shape, generator=generator))


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_a_generator_that_is_given_draws_the_same_numbers(decision):
    model, x = nn.ModuleList([Drops()]), torch.randn(5, WIDTH, requires_grad=True)
    part = model[0]

    def run(decision):
        generator = torch.Generator().manual_seed(3)
        if decision is None:
            loss = part(part(x, generator), generator).sum()
        else:
            with ActivationStore(model, f"0 : {decision}", min_bytes=0):
                loss = part(part(x, generator), generator).sum()
        return torch.autograd.grad(loss, x)[0], generator.get_state()

    check_same(run(decision), run(None))


@pytest.mark.parametrize("decision", RECOMPUTE)
def test_a_hook_may_be_gone_by_backward(decision):
    model, plain = (blocks(hooked(nn.utils.weight_norm), nn.Tanh) for _ in range(2))
    x, leaves = torch.randn(5, WIDTH), [list(each.parameters()) for each in (model, plain)]
    with ActivationStore(model, f"*.0 : {decision}", min_bytes=0):
        loss = model(x).square().sum()
    wanted = loss_of(plain, None, x)
    for block in model:
        nn.utils.remove_weight_norm(block[0])
    check_same(torch.autograd.grad(loss, leaves[0]), torch.autograd.grad(wanted, leaves[1]))
