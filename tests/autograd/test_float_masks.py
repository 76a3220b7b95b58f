"""Float masks, such as dropout's on a CPU: one bit an element, and their products with saved results are not stored."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from actstore import ActivationStore
from tests.autograd.checks import check_drained, check_same, gc_off

WIDTH = 64


class Block(nn.Module):
    """A block of a GPT, whose attention has dropout behind its softmax."""

    def __init__(self, p):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(p))
        self.dropouts = nn.ModuleList(nn.Dropout(p) for _ in range(2))

    def forward(self, x):
        q, k, v = (t.view(*x.shape[:2], 4, -1).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, 2))
        weights = self.dropouts[0]((q @ k.transpose(2, 3) / 4).softmax(-1))
        x = x + self.dropouts[1](self.proj((weights @ v).transpose(1, 2).flatten(2)))
        return x + self.mlp(self.norms[1](x))


def encoder(p, activation="relu"):
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, p, activation, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "encoder": encoder,
    "encoder with GELU": lambda p: encoder(p, "gelu"),
    "GPT": lambda p: nn.Sequential(Block(p), Block(p)),
}


def build(name, p, seed=0):
    torch.manual_seed(seed)
    return MODELS[name](p), torch.randn(4, 24, WIDTH)


def gradients(model, *batch, store=None):
    torch.manual_seed(1)
    if store is None:
        loss = model(*batch).sin().sum()
    else:
        with store:
            loss = model(*batch).sin().sum()
    return torch.autograd.grad(loss, list(model.parameters()))


def held_share(name, policy, p):
    """The share of the saved bytes that is held."""
    model, batch = build(name, p)
    with (store := ActivationStore(model, policy, min_bytes=0)):
        loss = model(batch).sin().sum()
    report = store.report()
    del loss
    check_drained(store)
    return report.held_bytes / report.saved_bytes


@pytest.mark.parametrize("policy", ["derive", "int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_dropout_leaves_the_savings(name, policy):
    assert held_share(name, policy, 0.1) <= 1.05 * held_share(name, policy, 0.0)


@pytest.mark.parametrize("policy", ["derive", "derive(raw @ disk)", "recompute(keep)"])
@pytest.mark.parametrize("name", MODELS)
def test_exact_policies_have_the_gradients_of_plain(name, policy):
    model, batch = build(name, 0.1)
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        for _ in range(2):
            check_same(gradients(model, batch, store=store), gradients(model, batch))
        check_drained(store)


class Masked(nn.Module):
    """A result that its operator saves, times a tensor without a gradient, read by a product with a weight."""

    def __init__(self, mask, operator=torch.softmax, shape=(8, WIDTH)):
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.rand(shape)) for _ in range(2))
        self.mask, self.operator = mask, operator

    def forward(self, x):
        result = self.operator(x * self.first, -1) if self.operator is torch.softmax else self.operator(x * self.first)
        return self.mask(result) * self.last


def sites(model, policy, *batch, **options):
    """Run under a store, and compare with plain where the policy is exact. Returns held share and note by site."""
    store = ActivationStore(model, policy, min_bytes=0, **options)
    found = gradients(model, *batch, store=store)
    if "int" not in policy:
        check_same(found, gradients(model, *batch))
    return {site.site: (site.held_bytes / (site.saved_bytes or 1), site.note) for site in store.report().sites}


def bernoulli(x, p=0.9):
    return torch.bernoulli(torch.full_like(x, p))


KINDS = {
    "dropout": lambda x: F.dropout(x, 0.2),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "mask": lambda x: x * bernoulli(x),
    "scaled mask": lambda x: (bernoulli(x) / 0.9) * x,
    "signed": lambda x: x * torch.where(bernoulli(x) > 0, -0.0, 1.0).to(x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("policy", ["derive", "unprotected int8", "int8 @ disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_take_one_bit(kind, policy, dtype):
    model = Masked(KINDS[kind], torch.relu).to(dtype)
    found = sites(model, policy, torch.randn(8, WIDTH, dtype=dtype))
    held = 1 / (8 * dtype.itemsize)  # on its way to disk, too
    shares = [share for share, note in found.values() if policy == "derive" or "two values" in note]
    assert held in shares or ("disk" in policy and shares == [0])


def test_masks_of_autocast():
    model, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1)), torch.randn(8, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        found = sites(model, "derive", batch)
    assert found["1[0]"][0] == 1 / 16


THREE_VALUES = {
    "a third value": lambda x: x * bernoulli(x).index_fill_(0, torch.tensor([3]), 0.5),
    "noise that is written later": lambda x: F.rrelu(x - 0.5, training=True),
    "gaps": lambda x: x * bernoulli(torch.cat([x, x], 1))[:, ::2],
}


@pytest.mark.parametrize("policy", ["derive", "int8"])
@pytest.mark.parametrize("kind", THREE_VALUES)
def test_other_tensors_stay_as_they_are(kind, policy):
    found = sites(Masked(THREE_VALUES[kind]), policy, torch.randn(8, WIDTH))
    assert not any("two values" in note for _, note in found.values())
    assert 1 / 32 not in {share for share, _ in found.values()}


def test_a_mask_that_has_more_values_in_the_next_step():
    model = Masked(lambda x: x * model.made, torch.relu)
    store, held = ActivationStore(model, "int8", min_bytes=0), []
    for made in (bernoulli(torch.ones(8, WIDTH)), torch.randn(8, WIDTH), bernoulli(torch.ones(8, WIDTH))):
        model.made = made.clone()
        with store:
            y = model(torch.randn(8, WIDTH))
        held.append(store.report().held_bytes)
        check_same(y.grad_fn.next_functions[0][0]._saved_other, made)
        del y
    assert held[1] - held[0] == held[1] - held[2] == 8 * WIDTH * 4 - 8 * WIDTH // 8
    check_drained(store)


# -- products of a saved result and a mask ----------------------------------------------------------------------------

RESULTS = {"softmax": torch.softmax, "relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "exp": torch.exp}


@pytest.mark.parametrize("order", ["mask last", "mask first"])
@pytest.mark.parametrize("name", RESULTS)
def test_a_product_of_a_saved_result_is_derived(name, order):
    mask = KINDS["mask" if order == "mask last" else "scaled mask"]
    found = sites(Masked(mask, RESULTS[name]), "derive", torch.randn(8, WIDTH))
    assert sum(share == 0 for share, _ in found.values()) == 1


def test_a_lossy_policy_derives_what_exact_tensors_give():
    found = sites(Masked(KINDS["dropout"]), "int8", torch.randn(8, WIDTH))
    assert sum(share == 0 and "derived" in note for share, note in found.values()) == 1
    found = sites(Masked(KINDS["dropout"], torch.tanh), "int8", torch.randn(8, WIDTH))  # which is lossy itself
    assert not any("derived" in note for _, note in found.values())


def changed(x):
    with torch.no_grad():
        x[0] = 0.5
    return x * bernoulli(x)


def changed_later(x):
    y = x * bernoulli(x)
    with torch.no_grad():
        y[0] = 0.5
    return y


@pytest.mark.parametrize("mask", [changed_later, lambda x: x * 2.0, lambda x: x.mT.mT * bernoulli(x)])
@pytest.mark.parametrize("policy", ["derive", "int8"])
def test_other_products_are_stored(mask, policy):
    found = sites(Masked(mask), policy, torch.randn(8, WIDTH))
    assert all(share for share, _ in found.values())


@pytest.mark.parametrize("policy", ["derive", "int8"])
def test_a_result_that_was_written_to_is_refused_as_by_autograd(policy):
    model, batch = Masked(changed), torch.randn(8, WIDTH)
    with (store := ActivationStore(model, policy, min_bytes=0)):
        loss = model(batch).sum()
    assert all(site.held_bytes for site in store.report().sites)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
