"""Rules and functions that decide by the operator that made a saved tensor."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from actstore import ActivationStore
from actstore.autograd import hooks
from actstore.errors import PolicyError
from actstore.policy import Encode, Keep, Site, parse
from tests.autograd.checks import check_drained, check_same, gc_off, train_step
from tests.autograd.random_modules import Cubed


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        heads = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.proj(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), Attention()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Linear(16, 16), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def batch():
    return (torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(3)),)


def operators(model, *args):
    """The operator of each saved tensor that a function sees, by module."""
    seen = {}

    def decide(site, spec):
        seen.setdefault(site.name, []).append(site.operator)
        return Keep()

    with ActivationStore(model, decide, min_bytes=0):
        model(*args).sum().backward()
    return seen


def test_a_function_is_told_the_operator():
    seen = operators(Model(), *batch())
    assert seen["stem"] == [""]  # the input
    assert set(seen["blocks.0.attn"]) == {"aten.addmm", "aten._scaled_dot_product_flash_attention_for_cpu", ""}
    assert seen["blocks.0.attn.proj"] == ["aten._scaled_dot_product_flash_attention_for_cpu"]
    assert seen["blocks.0.mlp.0"] == ["aten.add"]
    assert seen["blocks.0.mlp.1"] == ["aten.addmm"]
    assert seen["blocks.0.mlp.2"] == ["aten.gelu"]


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.function(x * self.scale).sin()


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x.exp(), "aten.exp"),
        (lambda x: x.exp().transpose(0, 1)[1:].contiguous().double(), "aten.exp"),
        (lambda x: x.add(1).mul_(2), "aten.mul"),
        (lambda x: F.relu(x.add(1), inplace=True), "aten.relu"),
        (lambda x: x.softmax(-1), "aten._softmax"),
        (lambda x: x.detach().exp().requires_grad_(), ""),
        (Cubed.apply, ""),
        (lambda x: x.exp().unbind(0)[0].view(2, -1), "aten.exp"),
        (lambda x: torch.view_as_real(torch.fft.fft(x)), "aten._fft_r2c"),
    ],
)
def test_views_copies_and_casts_pass_values_on(function, operator):
    seen = operators(Call(function), torch.randn(4, 6, 16))
    assert seen[""][-1] == operator


def test_sites_are_equal_without_it():
    assert Site("a", 0, operator="aten.mm") == Site("a", 0)
    assert str(Site("a", 0, operator="aten.mm")) == "a[0]"


def where(store):
    return {site.site: site.decision for site in store.report().sites if site.stored_bytes}


@pytest.mark.parametrize("decision", ["raw", "raw @ disk", "expack", "derive(raw @ disk)"])
def test_gradients_are_plain_and_only_those_tensors_are_stored(decision):
    model = Model()
    wanted = train_step(Model(), batch())
    store = ActivationStore(model, f"blocks.*/@matmul : {decision}; * : keep", min_bytes=0)
    with gc_off():
        check_same(train_step(model, batch(), store), wanted)
        check_drained(store)
    names = {name.partition("[")[0] for name in where(store)}
    assert names == {"blocks.0.norm", *(f"blocks.{i}.{part}" for i in range(2) for part in ("attn", "mlp.1"))}


def test_rules_of_operators_and_of_modules_decide_in_order():
    model = Model()
    text = "blocks.0.mlp : keep; */@aten.gelu : int8; blocks.*/@sdpa : raw; */@matmul : expack; * : keep"
    store = ActivationStore(model, text, min_bytes=0)
    with store:
        loss = model(*batch()).sum()
    loss.backward()
    found = where(store)
    assert not any(name.startswith("blocks.0.mlp") for name in found)
    assert found["blocks.1.mlp.2[0]"] == "int8"
    assert found["blocks.1.mlp.1[0]"] == "expack"
    assert {decision for name, decision in found.items() if name.startswith("blocks.0.attn")} == {"raw", "expack"}


def test_one_site_under_two_operators():
    """A site follows no precedent of a tensor that another operator made."""

    class Varied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = nn.Sigmoid(), nn.Parameter(torch.ones(64))

        def forward(self, x, function):
            return self.inner(function(x * self.scale)) * 2

    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.varied = Varied()
            self.varied.inner = nn.Softplus()  # saves its input

        def forward(self, x):
            return sum(self.varied(x, function) for function in (torch.sin, torch.cos, torch.sin))

    model, x = Saving(), torch.randn(8, 64)
    store = ActivationStore(model, "*/@aten.cos : raw; * : keep", min_bytes=0)
    for _ in range(3):
        with store:
            loss = model(x).sum()
        (site,) = [site for site in store.report().sites if site.site.startswith("varied.inner")]
        assert (site.stored_bytes, site.saved_bytes) == (x.nbytes, 3 * x.nbytes)
        loss.backward()


def test_policies_without_operators_inspect_no_nodes_for_them(monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(hooks, "producer_of", fail)
    model = Model()
    for text in ("keep", "raw", "blocks.*/qkv : int8; * : raw", "derive"):
        with ActivationStore(model, text, min_bytes=0):
            model(*batch()).sum().backward()
    with pytest.raises(AssertionError), ActivationStore(model, "*/@sdpa : raw; * : raw", min_bytes=0):
        model(*batch()).sum().backward()


def test_modules_that_no_operator_rule_reaches_follow_precedents():
    followed = []
    for text in ("raw", "blocks.0/@sdpa : raw; * : raw"):
        model = Model()
        store = ActivationStore(model, text, min_bytes=0)
        with store:
            model(*batch()).sum().backward()
        names = {str(account.site) for account in store._store.ledger.accounts() if account.precedent is not None}
        followed.append({name for name in names if text == "raw" or not name.startswith("blocks.0")})
    plain, found = followed
    assert found == {name for name in plain if not name.startswith("blocks.0")}
    assert found


def test_without_a_model():
    x = torch.randn(64, 64, requires_grad=True)
    store = ActivationStore(policy="*/@aten.exp : raw; * : keep", min_bytes=0)
    with store:
        loss = x.sin().exp().sin().cos().sum()
    assert store.report().stored_bytes == x.nbytes
    loss.backward()


def test_the_class_as_a_module_says_how_to_write_it():
    with pytest.raises(PolicyError, match=r"'@sdpa' is a class of operators. Write '\*/@sdpa'"):
        ActivationStore(Model(), "@sdpa : keep")


def test_aliases_of_modules_with_operators():
    store = ActivationStore(Model(), "@blocks/@sdpa : raw; * : keep", min_bytes=0)
    assert store.policy == parse("blocks.*/@sdpa : raw; * : keep")


def test_the_limit_of_inspected_nodes_is_that_of_stored_tensors(monkeypatch):
    """A function that is told the operator stores as many tensors as one that is not."""
    monkeypatch.setattr(hooks, "MAX_NODES_INSPECTED", 8)
    x = torch.randn(16, requires_grad=True)
    store = ActivationStore(policy=lambda site, spec: Encode(parse("raw").default.codec), min_bytes=0)
    with store:
        y = x
        for _ in range(12):
            y = (y * 1.5).sin()
    assert store.report().stored_bytes == 8 * x.nbytes
    y.sum().backward()
