"""Aliases in policies: the parts of a model whatever their names."""

import pytest
import torch
from torch import nn

import actstore
from actstore import ActivationStore, Encode, Recompute, Rules
from actstore.codecs import Int8
from actstore.errors import PolicyError
from actstore.policy.aliases import expand


class Attention(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.q_norm = nn.LayerNorm(4)

    def forward(self, x):
        x = super().forward(x)
        return torch.softmax(self.q_norm(x) @ x.mT, -1) @ x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Attention(), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def model():
    return nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(12)), "norm": nn.LayerNorm(4)})


EXPANDED = {
    "@blocks : int8": ["layers.*"],
    "@attention : int8": ["layers.*.attn"],
    "@mlp : int8": ["layers.*.mlp"],
    "@norm : int8": ["norm", "layers.*.norm1", "layers.*.norm2"],
    "@mlp.0 : int8": ["layers.*.mlp.0"],
    "@mlp/hidden : int8": ["layers.*.mlp/hidden"],
    "layers.0 : keep; @mlp : int8": ["layers.0", "layers.*.mlp"],
}


@pytest.mark.parametrize("text", EXPANDED)
def test_an_alias_stands_for_names(text):
    expanded = expand(Rules.parse(text), model())
    assert [pattern for pattern, _ in expanded.rules] == EXPANDED[text]


class AdaLayerNorm(nn.Module):  # as of diffusers: a normalisation's name, and one inside
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)


class Conv2dNormActivation(nn.Sequential): ...


def test_norms_are_the_innermost_modules_of_that_name():
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    stem = Conv2dNormActivation(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    net = nn.ModuleDict({"stem": stem, "norm_out": AdaLayerNorm(), "weighted": weighted})
    assert [name for name, _ in expand(Rules.parse("@norm : int8"), net).rules] == ["stem.1", "norm_out.norm"]


def test_a_glob_that_covers_another_one_stands_for_both():
    blocks = nn.ModuleList(nn.ModuleDict({"mixer": AdaLayerNorm(), "norm": nn.LayerNorm(4)}) for _ in range(2))
    net = nn.ModuleDict({"layers": blocks})
    assert [name for name, _ in expand(Rules.parse("@norm : int8"), net).rules] == ["layers.*.norm"]


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        pairs = ([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())] for _ in range(2))
        self.layers = nn.ModuleList(map(nn.ModuleList, pairs))

    def forward(self, x):
        for first, second in self.layers:
            x = second(first(x))
        return x


def test_blocks_have_a_forward():
    net = Lists()
    assert [name for name, _ in expand(Rules.parse("@blocks : int8"), net).rules] == ["layers.*.*"]
    store = ActivationStore(net, "recompute", min_bytes=0)
    with store:
        loss = net(torch.randn(64, 4)).sum()
    loss.backward()
    report = store.report()
    sites = {site.site.rpartition("[")[0] for site in report.sites if site.held_bytes}
    assert sites == {"layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"}
    assert report.held_bytes < report.saved_bytes


def test_a_glob_that_would_cover_more_is_not_used():
    blocks = nn.ModuleList(nn.ModuleDict({"attention": nn.ModuleDict({"output": nn.Linear(4, 4)})}) for _ in range(2))
    for block in blocks:
        block["output"] = nn.Linear(4, 4)
    net = nn.ModuleDict({"layer": blocks})
    assert [name for name, _ in expand(Rules.parse("@mlp : int8"), net).rules] == ["layer.0.output", "layer.1.output"]
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert [name for name, _ in expand(Rules.parse("@blocks : int8"), plain).rules] == ["0", "1"]


def test_rules_as_values_have_aliases_too():
    rules = Rules([("@mlp", Recompute()), ("@attention", Encode(Int8()))], default=Encode(Int8()))
    expanded = expand(rules, model())
    assert expanded.decide("layers.3.mlp.0") == Recompute()
    assert expanded.default == rules.default
    assert expand(Rules.parse("layers.* : int8"), model()) == Rules.parse("layers.* : int8")


def test_a_store_follows_them():
    net = nn.Sequential(*(Block() for _ in range(3)))
    store = ActivationStore(net, "@mlp : recompute; @norm : int8", min_bytes=0)
    with store:
        loss = net(torch.randn(64, 4)).sum()
    loss.backward()
    decisions = {site.site.split("[")[0]: site.decision for site in store.report().sites}
    assert decisions["0.norm1"] == "int8"
    assert "0.mlp.0" not in decisions  # only the input of its region is saved
    assert "0.mlp" in decisions


class Mixer(nn.Module):
    """Attention under a name that says nothing; and what has the name, and runs no attention."""

    def __init__(self):
        super().__init__()
        self.project, self.attn, self.ff = (
            nn.MultiheadAttention(4, 2),
            nn.Sequential(nn.Conv1d(4, 4, 1)),
            nn.Linear(4, 4),
        )

    def forward(self, x):
        return self.ff(self.project(x, x, x)[0] * self.attn(x.mean(0, keepdim=True).mT).mT)


def test_attention_is_found_by_what_runs():
    net = nn.ModuleDict({"layers": nn.ModuleList(Mixer() for _ in range(2))})
    assert [name for name, _ in expand(Rules.parse("@attention : keep"), net).rules] == ["layers.*.project"]


def test_a_block_that_is_attention_itself_is_found_beside_others():
    net = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), Attention(), nn.Linear(4, 4)])})
    assert [name for name, _ in expand(Rules.parse("@attention : keep"), net).rules] == ["layers.1"]
    with pytest.raises(PolicyError, match="'@attention' finds nothing"):
        expand(Rules.parse("@attention : keep"), nn.ModuleList(Attention() for _ in range(2)))


def test_what_cannot_be_is_refused_with_the_names_that_there_are():
    with pytest.raises(PolicyError, match=r"'@mpl' is an unknown alias. Did you mean '@mlp'"):
        ActivationStore(model(), "@mpl : int8")
    with pytest.raises(PolicyError, match=r"'@attention' finds nothing.*it has layers\.\*"):
        ActivationStore(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])}), "@attention : int8")
    with pytest.raises(PolicyError, match=r"layers\.\* have no module that runs scaled_dot_product_attention"):
        ActivationStore(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])}), "@attention : int8")
    with pytest.raises(PolicyError, match="no model was given"):
        ActivationStore(policy="@mlp : int8")
    with pytest.raises(actstore.errors.PolicyError, match=r"layers\.\*\.mlp\.x' matches no module"):
        ActivationStore(model(), "@mlp.x : int8")
