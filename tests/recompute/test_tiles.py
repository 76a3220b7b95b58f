"""``recompute(tiles=n)``: modules that run on slices of their tokens, and what is refused because it mixes them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from actstore import ActivationStore, Recompute, Rules
from actstore.devices import cpu_memory
from actstore.errors import ChainError, ConfigError, PolicyError, StateError

WIDTH, TOKENS = 16, 40


class Layer(nn.Module):
    """A module made of functions of its input and of a linear layer."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function
        self.place = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, *others):
        return self.function(self, x, *others)


def heads(self, x):
    split = self.linear(x).unflatten(-1, (4, 4)).transpose(1, 2)  # tokens move to another dimension
    return F.layer_norm(split, (4,)).softmax(-1).transpose(1, 2).flatten(2)


SEPARATE = {
    "mlp": lambda self, x: x + F.gelu(self.linear(F.layer_norm(x, (WIDTH,)))),
    "gated": lambda self, x: F.silu(self.linear(x)) * self.linear(x) + x,
    "glu": lambda self, x: F.glu(torch.cat((self.linear(x), x), -1)),
    "chunks": lambda self, x: torch.cat(self.linear(x).chunk(2, -1)[::-1], -1),
    "rms": lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) + F.rms_norm(x, (WIDTH,)),
    "heads": heads,
    "in place": lambda self, x: self.linear(x).mul_(2).relu_(),
    "reduced": lambda self, x: x * self.linear(x).sum(-1).sigmoid()[..., None],
    "variance": lambda self, x: self.linear(x) / (x.var(-1, keepdim=True) + 1),
    "norm": lambda self, x: F.normalize(self.linear(x), dim=-1),
    "last feature": lambda self, x: self.linear(x)[..., 1:] * x[..., :1],
    "samples": lambda self, x: self.linear(x) - x.mean(0, keepdim=True),
}


def numbers_of_samples(self, x):
    return self.linear(x).transpose(0, 1).reshape(x.shape)  # one sample tells nothing


def written(self, x):
    self.count += 1
    return self.linear(x)


def counted(self, x):
    return self.linear(x) / x.shape[1]


def buffered(self, x):
    made = torch.zeros_like(x[0].detach())
    made.copy_(x[0].detach())
    return self.linear(x) @ (made.t() @ made)


def shifted(self, x):
    return self.linear(x) + torch.arange(x.shape[1])[:, None]


MIXED = {
    "attention": (lambda self, x: F.scaled_dot_product_attention(x, x, x, is_causal=True), "bmm|scaled_dot_product"),
    "causal product": (lambda self, x: (x @ x.transpose(1, 2)).tril() @ x, "bmm"),
    "mean": (lambda self, x: x - x.mean(1, keepdim=True), "mean"),
    "mean of all": (lambda self, x: x * self.linear(x).mean(), "mean"),
    "softmax": (lambda self, x: self.linear(x).softmax(1), "softmax"),
    "cumsum": (lambda self, x: self.linear(x).cumsum(1), "cumsum"),
    "batch norm": (lambda self, x: F.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x), "batch_norm"),
    "shift": (lambda self, x: torch.cat((x[:, 1:], x[:, :1]), 1), "slice"),
    "flip": (lambda self, x: self.linear(x).flip(1), "flip"),
    "sort": (lambda self, x: self.linear(x).sort(1).values, "sort"),
    "positions": (lambda self, x: self.linear(x) + self.place[: x.shape[1]], "not an input"),
    "arange": (shifted, "not an input"),
    "dropout": (lambda self, x: F.dropout(self.linear(x), 0.1), "dropout"),
    "random": (lambda self, x: self.linear(x) + torch.rand(WIDTH), "random numbers"),
    "the layer's state": (written, "writes to"),
    "a buffer of its own": (buffered, "zeros_like|writes to|mm"),
    "number of tokens": (counted, "other values"),
    "samples become tokens": (numbers_of_samples, "other values"),
    "tokens become features": (lambda self, x: self.linear(x).transpose(1, 2), "returns Tensor"),
    "one number": (lambda self, x: self.linear(x).square().sum(-1), "returns Tensor"),
    "no tensor": (lambda self, x: (self.linear(x), 1), "returns int"),
    "the last token": (lambda self, x: self.linear(x)[:, -1], "select"),
}


def gradients(layer, policy, *inputs, samples=3):
    torch.manual_seed(0)
    x = torch.randn(samples, TOKENS, WIDTH, requires_grad=True)
    layer.zero_grad()
    with ActivationStore(layer, policy, min_bytes=0):
        output = layer(x, *inputs)
    output.square().sum().backward()
    return output.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(1)
        self.layer = Layer(function)

    def forward(self, x, *others):
        return self.layer(x, *others)


def check_close(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()


@pytest.mark.parametrize("name", SEPARATE)
@pytest.mark.parametrize("tiles", [2, 3, 7])
def test_values_and_gradients_are_those_of_the_whole_but_for_rounding(name, tiles):
    model = Model(SEPARATE[name])
    check_close(gradients(model, f"layer : recompute(tiles={tiles})"), gradients(model, "keep"))


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_tokens_is_refused_by_name(name):
    function, words = MIXED[name]
    model = Model(function)
    before = model.layer.count.clone()
    with pytest.raises(StateError, match=words) as error:
        gradients(model, "layer : recompute(tiles=4)")
    assert "layer (recompute(tiles=4))" in str(error.value)
    assert "Leave tiles out here" in str(error.value)
    assert torch.equal(model.layer.count, before)
    if "aten" in str(error.value):
        assert "test_tiles.py:" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_check_knows_the_precision(dtype):
    x = torch.randn(2, TOKENS, WIDTH, dtype=dtype)
    for name, function in (("gated", SEPARATE["gated"]), ("count", MIXED["number of tokens"][0])):
        store = ActivationStore(model := Model(function).to(dtype), "layer : recompute(tiles=4)", min_bytes=0)
        with store, nullcontext() if name == "gated" else pytest.raises(StateError, match="other values"):
            model(x)


@given(st.integers(1, 6), st.integers(1, 70), st.integers(1, 80), st.sampled_from(sorted(SEPARATE)), st.booleans())
def test_any_sizes(samples, tokens, tiles, name, flat):
    model = Model(SEPARATE[name])
    if name in ("heads", "samples") and flat:
        return
    shape = (tokens, WIDTH) if flat else (samples, tokens, WIDTH)
    results = []
    for policy in ("keep", f"layer : recompute(tiles={tiles})"):
        model.zero_grad()
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with ActivationStore(model, policy, min_bytes=0):
            output = model(x)
        output.square().sum().backward()
        results.append([output.detach(), x.grad, model.layer.linear.weight.grad])
    found, wanted = ([each for each in one if each is not None] for one in results)
    check_close(found, wanted)


@pytest.mark.parametrize("tokens", [TOKENS, 8])
def test_outputs_lie_in_memory_as_those_of_the_whole(tokens):
    """What draws random numbers later fills them in that order."""
    model = Model(lambda self, x: x * 2)
    for x in (torch.randn(3, tokens, WIDTH), torch.randn(tokens, 3, WIDTH).transpose(0, 1)):
        with ActivationStore(model, "layer : recompute(tiles=4)", min_bytes=0):
            found = model(x.requires_grad_())
        assert torch.equal(found, model(x))
        assert found.stride() == model(x).stride()


def test_inputs_wait_by_their_decision_and_two_inputs_are_cut_alike():
    model = Model(lambda self, x, y: self.linear(x) * y)
    y = torch.randn(3, TOKENS, WIDTH)
    wanted = gradients(model, "keep", y)
    check_close(gradients(model, "layer : recompute(raw @ disk, tiles=5)", y), wanted)
    found = gradients(model, "layer : recompute(int8, tiles=5)", y)
    assert 0 < (found[-1] - wanted[-1]).norm() < 0.02 * wanted[-1].norm()
    for odd in (torch.randn(3, 1, WIDTH), torch.randn(WIDTH), torch.nn.Parameter(torch.randn(3, TOKENS, WIDTH))):
        with pytest.raises(StateError, match="must be of one size in all inputs"):
            gradients(model, "layer : recompute(tiles=5)", odd)


def test_the_check_runs_once_for_each_kind_of_arguments():
    calls = []
    model = Model(lambda self, x: calls.append(x.shape[1]) or self.linear(x))
    store = ActivationStore(model, "layer : recompute(tiles=4)", min_bytes=0)
    for tokens, expected in ((40, [10, 8, 4, 4, 10, 10, 10, 10]), (40, [10] * 4), (8, [8])):
        calls.clear()
        with store:
            model(torch.randn(2, tokens, WIDTH, requires_grad=True))
        assert calls == expected


@pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")
def test_what_the_module_needs_while_it_runs_falls_with_the_number_of_slices():
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64)))
    x = torch.randn(1, 1024, 64, requires_grad=True)
    peaks = {}
    for policy in ("0 : recompute", "0 : recompute(tiles=8)"):
        store = ActivationStore(model, policy)
        for _ in range(2):
            cpu_memory.reset_peak()
            before = cpu_memory.max_memory_allocated()
            with store:
                loss = model(x).square().mean()
            loss.backward()
            peaks[policy] = cpu_memory.max_memory_allocated() - before
    whole, sliced = peaks.values()
    assert sliced < 0.25 * whole


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(512, 86), (100, 50), (40, 40)],  # six slices; two, as each has 128 tokens of 3 samples; one
)
def test_a_chosen_number_of_slices_makes_no_tensor_larger_than_the_input(tokens, size):
    cut = []

    def wide(self, x):
        cut.append(x.shape[1])
        return torch.cat((self.linear(x),) * 6, -1).chunk(6, -1)[0]

    model = Model(wide)
    store = ActivationStore(model, "layer : recompute(tiles=auto)", min_bytes=0)
    for checked in (True, False):
        with store:
            output = model(torch.randn(3, tokens, WIDTH, requires_grad=True))
        number = -(-tokens // size)
        assert cut[-number:] == [size] * (number - 1) + [tokens - (number - 1) * size]
        assert (len(cut) > number) == (checked and number > 1)
        output.sum().backward()
        cut.clear()


def test_words():
    assert str(Recompute(tiles=8)) == "recompute(tiles=8)"
    assert Rules.parse("recompute(tiles=auto)").default == Recompute(tiles="auto")
    with pytest.raises(ChainError, match="must be a number of slices"):
        Recompute(tiles="many")
    with pytest.raises(PolicyError, match="takes a number of slices for 'tiles', not 'many'"):
        Rules.parse("recompute(tiles=many)")
    for options in ({"segment": 2}, {"schedule": "sqrt"}, {"first": 1}):
        with pytest.raises(ChainError, match="tiles=2 of recompute goes with neither"):
            Recompute(tiles=2, **options)
    with pytest.raises(ChainError, match="must be a number of slices"):
        Recompute(tiles=0)
    with pytest.raises(ConfigError, match="tiles are not for compiled graphs"):
        ActivationStore(model := Model(SEPARATE["mlp"]), "layer : recompute(tiles=2)").compile(model)
