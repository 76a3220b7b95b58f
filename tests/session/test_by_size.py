"""Rules for the modules that saved more than so many bytes."""

import pytest
import torch
from torch import nn

from actstore import ActivationStore, Encode, Recompute, Rules
from actstore.codecs import Int8
from actstore.errors import ConfigError, PolicyError, StateError

WIDTHS = (8, 64, 16, 128)
ROWS = 32


class Block(nn.Module):
    """Saves its hidden tensor twice: gelu's input, and its output in the second linear layer."""

    def __init__(self, width):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def model():
    torch.manual_seed(0)
    return nn.Sequential(*map(Block, WIDTHS))


def trained(net, policy):
    store = ActivationStore(net, policy, min_bytes=0)
    torch.manual_seed(1)
    with store:
        loss = net(torch.randn(ROWS, 8)).square().mean()
    loss.backward()
    return store


def size(width):
    return 4 * ROWS * (8 + 2 * width)  # float32: the input, and the hidden tensor twice


@pytest.mark.parametrize("policy", ["keep", "raw", "int8", "recompute", "1 : recompute(raw @ disk); * : raw @ disk"])
def test_more_than_the_limit_is_more(policy):
    store = trained(model(), policy)
    limits = {0: [0, 1, 2, 3], size(8) - 1: [0, 1, 2, 3], size(8): [1, 2, 3], size(64): [3], size(128): []}
    for limit, chosen in limits.items():
        expected = Rules([(str(number), Recompute()) for number in chosen])
        assert store.rules_by_size(limit) == expected == store.rules_by_size(f"{limit} B")


def test_a_module_has_the_bytes_of_those_inside_of_it():
    net = nn.ModuleDict({"net": nn.ModuleDict({"halves": nn.ModuleList([model(), model()])})})
    store = ActivationStore(net, "keep", min_bytes=0)
    x = torch.randn(ROWS, 8)
    with store:
        loss = sum(half(x).sum() for half in net["net"]["halves"])
    loss.backward()
    total = sum(map(size, WIDTHS))
    names = lambda rules: [name for name, _ in rules.rules]  # noqa: E731
    assert names(store.rules_by_size(total - 1)) == ["net.halves.0"]  # the input of both belongs to the first
    assert names(store.rules_by_size(total - 4 * ROWS * 8 - 1)) == ["net.halves.0", "net.halves.1"]
    assert names(store.rules_by_size(size(64), among="net.halves.1.*")) == ["net.halves.1.3"]
    assert names(store.rules_by_size(0, among="*.halves.0.3*")) == ["net.halves.0.3"]  # the outermost
    assert names(store.rules_by_size(0, among="@blocks[1:]")) == ["net.halves.1"]
    assert names(store.rules_by_size(0, among="*")) == ["net"]


def test_the_rules_train_as_the_plain_model_does():
    net = model()
    plain = trained(net, "keep")
    gradients = [p.grad.clone() for p in net.parameters()]
    rules = plain.rules_by_size("8 KiB")
    assert str(rules) == "1 : recompute\n3 : recompute\n* : keep"
    net.zero_grad()
    report = trained(net, rules).report()
    assert {site.site.split("[")[0] for site in report.sites if site.decision == "recompute"} == {"1", "3"}
    assert all(map(torch.equal, gradients, [p.grad for p in net.parameters()]))
    assert report.held_bytes < plain.report().held_bytes


def test_the_decision_is_text_or_a_value():
    store = trained(model(), "keep")
    assert store.rules_by_size("16 KiB", "int8").rules == (("1", Encode(Int8())), ("3", Encode(Int8())))
    assert store.rules_by_size("16 KiB", Encode(Int8())) == store.rules_by_size("16 KiB", "int8")


def test_what_cannot_be_is_refused():
    net = model()
    store = ActivationStore(net, "keep", min_bytes=0)
    with pytest.raises(StateError, match="no module has saved a tensor in the store yet"):
        store.rules_by_size("1MiB")
    store = trained(net, "keep")
    with pytest.raises(ConfigError, match="larger_than='much': must be a number of bytes"):
        store.rules_by_size("much")
    with pytest.raises(PolicyError, match="'blocks' matches no module"):
        store.rules_by_size(0, among="blocks")
    with pytest.raises(PolicyError, match="names tensors, and a size is that of a module"):
        store.rules_by_size(0, among="1/hidden")
    with pytest.raises(PolicyError, match=r"'@blocks\[4:\]' selects none"):
        store.rules_by_size(0, among="@blocks[4:]")
    with pytest.raises(PolicyError, match="is a rule or several"):
        store.rules_by_size(0, "1 : keep")
    with pytest.raises(PolicyError, match="no model was given"):
        ActivationStore(policy="keep").rules_by_size(0)
