"""``actstore.tile``, and rules with tiles for a module that returns its loss: logits that never exist whole."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import actstore
from actstore import ActivationStore
from actstore.devices import cpu_memory
from actstore.errors import ConfigError, StateError

WIDTH, TOKENS, CLASSES = 16, 44, 30
torch.manual_seed(0)
WEIGHT = torch.rand(CLASSES)
ENTROPIES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "ignored": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed sum": {"label_smoothing": 0.1, "reduction": "sum"},
    "weighted": {"weight": WEIGHT},
    "all": {"weight": WEIGHT, "label_smoothing": 0.2, "ignore_index": 3},
}


class Head(nn.Module):
    """A linear layer and its loss."""

    def __init__(self, loss=F.cross_entropy, classes=CLASSES):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(WIDTH, classes)
        self.loss = loss

    def forward(self, x, labels):
        return self.loss(self.linear(x).flatten(0, -2), labels.flatten())


def data(samples=3, tokens=TOKENS, dtype=torch.float32, masked=0):
    make = torch.Generator().manual_seed(0)
    x = torch.randn(samples, tokens, WIDTH, generator=make).to(dtype).requires_grad_()
    labels = torch.randint(0, CLASSES, (samples, tokens), generator=make)
    labels[:, :masked] = -100
    return x, labels


def gradients(head, run, x, labels, context=nullcontext, scale=1.0):
    x.grad = None
    head.zero_grad()
    with context():
        loss = run(x, labels)
    (loss * scale).backward()
    return loss.detach(), x.grad, *(p.grad for p in head.parameters() if p.grad is not None)


def check_close(found, wanted, allowed=2e-6):
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).double().norm() <= allowed * other.double().norm(), (one, other)


def test_logits_of_a_slice_are_no_larger_than_the_hidden_states():
    cut = []
    head = Head(lambda logits, labels: cut.append(len(labels)) or F.cross_entropy(logits, labels), classes=6 * WIDTH)
    x, labels = data(tokens=400)
    wanted = gradients(head, actstore.tile(head, tiles=6), x, labels)
    cut.clear()
    assert all(map(torch.equal, gradients(head, actstore.tile(head), x, labels), wanted))
    assert cut[-6:] == [3 * 67] * 5 + [3 * 65]


@pytest.mark.parametrize("name", ENTROPIES)
@pytest.mark.parametrize("masked", [0, 30, TOKENS - 1])
def test_loss_and_gradients_are_those_of_the_whole_but_for_rounding(name, masked):
    head = Head(lambda logits, labels: F.cross_entropy(logits, labels, **ENTROPIES[name]))
    if "ignore_index" in ENTROPIES[name]:
        masked = 0
    batch = data(masked=masked)
    wanted = gradients(head, head, *batch, scale=3.0)
    for tiles in (2, 5):
        check_close(gradients(head, actstore.tile(head, tiles=tiles), *batch, scale=3.0), wanted)


def test_a_loss_whose_tokens_are_all_ignored_has_no_gradients_and_is_nan_as_plain():
    head, batch = Head(), data(masked=TOKENS)
    wanted, found = gradients(head, head, *batch), gradients(head, actstore.tile(head, tiles=3), *batch)
    assert wanted[0].isnan()
    assert found[0].isnan()
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert torch.equal(one, other)


@given(st.integers(1, 4), st.integers(1, 60), st.integers(1, 70), st.sampled_from(sorted(ENTROPIES)))
def test_any_sizes(samples, tokens, tiles, name):
    head = Head(lambda logits, labels: F.cross_entropy(logits, labels, **ENTROPIES[name]))
    batch = data(samples, tokens)
    batch[1][0, 0] = 4  # not ignored
    check_close(gradients(head, actstore.tile(head, tiles=tiles), *batch), gradients(head, head, *batch), 4e-6)


def losses():
    """Losses of hidden states and labels that name what they are made of."""
    head = nn.Linear(WIDTH, CLASSES, bias=False)
    norm = nn.LayerNorm(WIDTH)

    def capped(x, labels):  # as Gemma
        return F.cross_entropy((30 * torch.tanh(head(norm(x)) / 30)).view(-1, CLASSES), labels.view(-1))

    def likelihoods(x, labels):  # as GRPO
        logits = head(x)
        return (logits.gather(-1, labels[..., None])[..., 0] - logits.logsumexp(-1)).exp().sum()

    def with_z(x, labels):
        logits = head(x).float()
        z = logits.logsumexp(-1).square().sum()
        return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), reduction="sum") / 7 + 1e-4 * z

    def each(x, labels):
        return (F.cross_entropy(head(x).transpose(1, 2), labels, reduction="none") * labels.ne(3)).sum()

    def chosen(x, labels):
        return -head(x).log_softmax(-1).mul(F.one_hot(labels, CLASSES)).sum(-1).sum() / torch.tensor(5.0)

    def likelihood(x, labels):
        return 2 * F.nll_loss(head(x).log_softmax(-1).flatten(0, 1), labels.flatten())

    def squares(x, labels):
        return (head(x).sum(-1) - labels).square().sum()

    return {
        one.__name__: (one, nn.ModuleList([head, norm]))
        for one in (capped, likelihoods, with_z, each, chosen, likelihood, squares)
    }


@pytest.mark.parametrize("name", losses())
def test_other_losses(name):
    function, modules = losses()[name]
    tiled = actstore.tile(function, tiles=4)
    if name == "chosen":
        with pytest.raises(StateError, match=r"aten\.(aminmax|min)\."):
            tiled(*data())
        return
    check_close(gradients(modules, tiled, *data()), gradients(modules, function, *data()), 4e-6)


def test_class_probabilities():
    head = nn.Linear(WIDTH, CLASSES)
    x, _ = data()
    wanted_probabilities = torch.rand(3, TOKENS, CLASSES).softmax(-1)

    def loss(x, wanted):
        return F.cross_entropy(head(x).flatten(0, 1), wanted.flatten(0, 1), label_smoothing=0.1, weight=WEIGHT)

    wanted = gradients(head, loss, x, wanted_probabilities)
    check_close(gradients(head, actstore.tile(loss, tiles=3), x, wanted_probabilities), wanted)


def test_the_causal_loss_of_transformers():
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = nn.Linear(WIDTH, CLASSES, bias=False)

    @actstore.tile(tiles=4)
    def loss(x, labels, items):
        return ForCausalLMLoss(head(x), None, CLASSES, num_items_in_batch=items, shift_labels=labels)

    x, labels = data(masked=9)
    for items in (None, 57, torch.tensor(57)):
        whole = partial(loss.__wrapped__, items=items)
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        wanted = gradients(head, whole, x, shifted)
        check_close(gradients(head, partial(loss, items=items), x, shifted), wanted)
        check_close([ForCausalLMLoss(head(x), labels, CLASSES, num_items_in_batch=items)], wanted[:1])


def test_other_outputs_and_containers():
    head = Head()

    @actstore.tile(tiles=4)
    def loss(batch):
        logits = head.linear(batch["x"])
        right = (logits.detach().amax(-1) > 0).sum()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), "count": right}

    x, labels = data()
    found = loss({"x": x, "labels": labels})
    assert torch.equal(found["count"], (head.linear(x).amax(-1) > 0).sum())
    assert found["count"].dtype == torch.int64
    found["loss"].backward()
    assert x.grad is not None


def test_a_function_with_a_value_for_each_token_runs_again():
    mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    x, _ = data()
    calls = []

    def function(x):
        calls.append(x.shape[1])
        return mlp(x)

    wanted = gradients(mlp, lambda x, _: function(x).square().sum(), x, None)
    tiled = actstore.tile(function, tiles=4)
    check_close(gradients(mlp, lambda x, _: tiled(x).square().sum(), x, None), wanted)
    calls.clear()
    tiled(x).sum().backward()
    assert calls == [11] * 8
    calls.clear()
    with torch.no_grad():
        tiled(x)
    assert calls == [11] * 4


REFUSED = {
    "a mean": (lambda h, x, y: F.cross_entropy(h(x).flatten(0, 1), y.flatten(), reduction="none").mean(), "mean"),
    "a masked mean": (lambda h, x, y: (h(x).sum(-1) * y).sum() / y.sum(), "not linear"),
    "two means": (lambda h, x, y: sum(F.cross_entropy(h(x).flatten(0, 1), y.flatten()) for _ in "ab"), "two cross"),
    "mean and sum": (lambda h, x, y: F.cross_entropy(h(x).flatten(0, 1), y.flatten()) + h(x).sum(), "not linear"),
    "a square": (lambda h, x, y: h(x).sum().square(), "not linear"),
    "a constant": (lambda h, x, y: h(x).sum() + 1, "not linear"),
    "the parameters": (lambda h, x, y: h(x).sum() + h.weight.square().sum(), "not linear"),
    "parameters alone": (lambda h, x, y: h.weight.square().sum(), "returns Tensor"),
    "rounded": (lambda h, x, y: h(x).sum().long(), "rounds"),
    "floored": (lambda h, x, y: h(x).sum() // 2, "rounds|not linear"),
    "shifted": (lambda h, x, y: F.cross_entropy(h(x[:, :-1]).flatten(0, 1), y[:, 1:].flatten()), "slice"),
    "attention": (lambda h, x, y: F.scaled_dot_product_attention(x, x, x).sum(), "bmm|scaled"),
    "batch norm": (lambda h, x, y: F.batch_norm(x.transpose(1, 2), None, None, training=True).sum(), "batch_norm"),
    "dropout": (lambda h, x, y: F.cross_entropy(F.dropout(h(x)).flatten(0, 1), y.flatten()), "dropout"),
    "classes are tokens": (lambda h, x, y: F.cross_entropy(x.flatten(1), y[:, 0]), "select|log_softmax|nll"),
    "a mean of others": (
        lambda h, x, y: h(x).sum() * F.cross_entropy(h.weight, torch.zeros(CLASSES, dtype=torch.int64)),
        "not over tokens",
    ),
    "both": (lambda h, x, y: (h(x), h(x).sum()), "returns Tensor"),
    "two losses": (lambda h, x, y: (h(x).sum(), x.sum()), "Return the loss alone"),
    "a loss of each feature": (lambda h, x, y: h(x).sum((0, 1)), "Return the loss alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_over_tokens_is_refused_by_name(name):
    function, words = REFUSED[name]
    head = nn.Linear(WIDTH, CLASSES)
    with pytest.raises(StateError, match=words) as error:
        actstore.tile(lambda x, y: function(head, x, y), tiles=4)(*data())
    assert "(tiles=4)" in str(error.value)
    if "aten" in str(error.value):
        assert "test_tiled_loss.py:" in str(error.value)


class Custom(torch.autograd.Function):
    """A product whose backward may do anything."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_what_the_loss_reads_beside_its_arguments():
    x, y = data()
    head = Head()
    made = head.linear.weight * 2
    with pytest.raises(StateError, match=r"reads what MulBackward0 belongs to: give it"):
        actstore.tile(lambda x, y: F.cross_entropy(F.linear(x, made).flatten(0, 1), y.flatten()), tiles=4)(x, y)
    with pytest.raises(StateError, match=r"CustomBackward, a custom autograd.Function"):
        actstore.tile(lambda x, y: head(Custom.apply(x), y), tiles=4)(x, y)


def test_hooks_of_weights_run_once_with_the_gradient_of_the_whole():
    head, batch = Head(), data()
    seen = []
    handle = head.linear.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
    found = gradients(head, actstore.tile(head, tiles=4), *batch)
    handle.remove()
    wanted = gradients(head, head, *batch)
    assert len(seen) == 1
    check_close([seen[0], found[2]], [wanted[2], 2 * wanted[2]])
    check_close(gradients(head, actstore.tile(head, tiles=4), *batch), wanted)


def test_words():
    for options in ({"tiles": 0}, {"tiles": 2.0}, {"tiles": 2, "dim": None}):
        with pytest.raises(ConfigError, match=r"must be ints, tiles 1 or more"):
            actstore.tile(F.mse_loss, **options)
    with pytest.raises(StateError, match=r"tiles cut dimension 1, which must be of one size"):
        actstore.tile(Head(), tiles=2)(torch.randn(3, TOKENS, WIDTH), torch.zeros(3, 5))


@pytest.mark.parametrize("dim", [0, -2])
def test_other_dimensions(dim):
    head = Head()
    x, labels = data(1)
    flat = x.detach()[0].requires_grad_(), labels[0] if dim == 0 else labels[0][:, None]
    check_close(gradients(head, actstore.tile(head, tiles=3, dim=dim), *flat), gradients(head, head, *flat))


def test_parameters_as_arguments_and_leaves_of_other_kinds():
    head = nn.Linear(WIDTH, CLASSES)
    frozen = torch.randn(CLASSES, requires_grad=True)  # a leaf that is no Parameter

    @actstore.tile(tiles=4)
    def loss(x, weight, labels):
        return F.cross_entropy(F.linear(x, weight, frozen).flatten(0, 1), labels.flatten())

    x, labels = data()
    loss(x, head.weight, labels).backward()
    wanted = torch.autograd.grad(
        F.cross_entropy(F.linear(x, head.weight, frozen).flatten(0, 1), labels.flatten()), (x, head.weight, frozen)
    )
    check_close((x.grad, head.weight.grad, frozen.grad), wanted)


@pytest.mark.parametrize("frozen", ["head", "trunk", "both"])
def test_what_is_frozen_has_no_gradient(frozen):
    head = Head()
    head.requires_grad_(frozen == "trunk")
    x, labels = data()
    x.requires_grad_(frozen == "head")
    loss = actstore.tile(head, tiles=4)(x, labels)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
        assert (x.grad is None) == (head.linear.weight.grad is not None)


def test_many_backward_runs_at_once():
    head, (x, labels) = Head(), data()
    factors = torch.tensor([1.0, -2.0])
    found = torch.autograd.grad(actstore.tile(head, tiles=4)(x, labels), x, factors, is_grads_batched=True)
    check_close(found, torch.autograd.grad(head(x, labels), x, factors, is_grads_batched=True))


def test_tied_weights_and_accumulated_gradients():
    embedding = nn.Embedding(CLASSES, WIDTH)
    _, labels = data()

    def loss(x, labels):
        return F.cross_entropy(F.linear(x, embedding.weight).flatten(0, 1), labels.flatten())

    results = []
    for run in (loss, actstore.tile(loss, tiles=4)):
        embedding.zero_grad()
        for _ in range(2):
            run(embedding(labels).tanh(), labels.roll(1)).backward()
        results.append([embedding.weight.grad])
    check_close(*results)


def test_one_backward():
    head, (x, labels) = Head(), data()
    tiled = actstore.tile(head, tiles=4)
    loss = tiled(x, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(StateError, match="for the second time"):
        loss.backward()
    loss = tiled(x, labels)
    with pytest.raises(StateError, match="no second derivatives"):
        torch.autograd.grad(loss, x, create_graph=True)
    (found,) = torch.autograd.grad(tiled(x, labels), head.linear.bias)
    (wanted,) = torch.autograd.grad(head(x, labels), head.linear.bias)
    check_close([found], [wanted])


def test_without_gradients_and_under_transforms():
    head, (x, labels) = Head(), data()
    tiled = actstore.tile(head, tiles=4)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            check_close([tiled(x.detach(), labels)], [head(x.detach(), labels)])
    found = torch.func.grad(tiled)(x.detach(), labels)
    check_close([found], torch.autograd.grad(head(x, labels), [x]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype):
    """Errors against float64 are at most those of the untiled run, whose sums have one order, too."""
    exact = Head().double()
    x, labels = data(2, 200, torch.float64)
    wanted = gradients(exact, exact, x, labels)
    head = Head().to(dtype)
    low = x.detach().to(dtype).requires_grad_(), labels
    whole, tiled = gradients(head, head, *low), gradients(head, actstore.tile(head, tiles=8), *low)
    for plain, found, true in zip(whole, tiled, wanted, strict=True):
        assert plain.dtype == found.dtype == dtype
        assert (found - true).norm() <= 1.25 * (plain - true).norm() + torch.finfo(dtype).eps * true.norm()


@pytest.mark.parametrize("first", [True, False])
def test_autocast(first):
    """Casts of weights that the check made have no graph: autocast must not reuse them."""

    def context():
        return torch.autocast("cpu", torch.bfloat16)

    head, batch = Head(), data()
    wanted = gradients(head, head, *batch, context)
    tiled = actstore.tile(head, tiles=4)
    if not first:
        gradients(head, tiled, *batch, context)
    check_close(gradients(head, tiled, *batch, context), wanted, 1e-2)


class Model(nn.Module):
    """A layer, and a module that returns the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.loss = Head()

    def forward(self, x, labels):
        return self.loss(self.layer(x), labels)


@pytest.mark.parametrize("policy", ["loss : recompute(tiles=4)", "layer : recompute; loss : recompute(tiles=4)"])
def test_a_module_that_returns_its_loss(policy):
    model, batch = Model(), data(masked=20)
    wanted = gradients(model, model, *batch)
    store = ActivationStore(model, policy, min_bytes=0)
    for _ in range(2):
        check_close(gradients(model, model, *batch, lambda: store), wanted)
    assert store.held_bytes == 0


def test_a_store_does_not_see_what_a_tiled_loss_saves():
    model, batch = Model(), data()
    wanted = gradients(model, model, *batch)
    model.loss.forward = actstore.tile(model.loss.forward, tiles=4)
    store = ActivationStore(model, "loss.* : int4", min_bytes=0)
    check_close(gradients(model, model, *batch, lambda: store), wanted)
    assert not any("loss" in name for name in store.held_by_module())
    with torch.autograd.graph.saved_tensors_hooks(lambda _: 1 / 0, lambda _: 1 / 0):
        actstore.tile(Head(), tiles=3)(*data())


def test_rules_for_modules_inside_a_tiled_loss_do_nothing():
    model, batch = Model(), data()
    wanted = gradients(model, model, *batch)
    store = ActivationStore(model, "layer : recompute(raw @ disk); loss.linear : recompute; * : int8", min_bytes=0)
    check_close(gradients(model, actstore.tile(model, tiles=4), *batch, lambda: store), wanted)
    assert store.report().saved_bytes == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint(reentrant):
    head, batch = Head(), data()
    wanted = gradients(head, head, *batch)
    tiled = actstore.tile(head, tiles=4)
    check_close(gradients(head, lambda x, y: checkpoint(tiled, x, y, use_reentrant=reentrant), *batch), wanted)


def test_a_failure_leaves_the_hooks_and_the_cache_as_they_were():
    class Failure(Exception):
        pass

    calls = []

    def fails(x, labels):
        calls.append(x.shape)
        if len(calls) > 5:
            raise Failure
        return x.sum()

    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu"), pytest.raises(Failure):
        actstore.tile(fails, tiles=4)(*data())
    assert not packed
    with hooks:
        torch.randn(3, requires_grad=True).exp()
    assert len(packed) == 1
    assert torch.is_autocast_cache_enabled()


@pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")
def test_logits_never_exist_whole():
    classes = 4096
    head = Head(classes=classes)
    x, labels = data(1, 512)
    peaks = []
    for run in (head, actstore.tile(head, tiles=8)):
        for _ in range(2):
            cpu_memory.reset_peak()
            before = cpu_memory.max_memory_allocated()
            gradients(head, run, x, labels)
            peaks.append(cpu_memory.max_memory_allocated() - before)
    logits = 4 * 512 * classes
    assert peaks[1] > 2 * logits
    assert peaks[3] < 0.6 * logits


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, where it goes on
def test_compiled_callers_break_around_it():
    head, batch = Head(), data()
    tiled = actstore.tile(head, tiles=4)
    compiled = torch.compile(lambda x, y: tiled(x, y) * 1, backend="eager")
    check_close(gradients(head, compiled, *batch), gradients(head, head, *batch))
