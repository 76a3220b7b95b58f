"""Slices of aliases and ranges of numbers, in patterns."""

import pickle
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from actstore import ActivationStore, Encode, Rules
from actstore.codecs import Int8
from actstore.errors import PolicyError
from actstore.policy import Recompute
from actstore.policy.aliases import expand
from actstore.policy.globs import MOST
from actstore.policy.pattern import Pattern, near_modules

INT8 = Encode(Int8())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x):
        return self.mlp(self.attn(x))


@cache
def model(count):
    """Return a model with the names of Transformers' Llama."""
    layers = nn.ModuleList(Layer() for _ in range(count))
    return nn.ModuleDict({"model": nn.ModuleDict({"layers": layers, "norm": nn.LayerNorm(1)})})


def covered(text, count):
    """Return the numbers of the layers that a policy text encodes."""
    policy = expand(Rules.parse(text), model(count))
    return [i for i in range(count) if policy.decide(f"model.layers.{i}") == INT8]


numbers = st.none() | st.integers(-14, 14)


@given(st.integers(1, 12), numbers, numbers, numbers.filter(lambda step: step != 0), st.booleans())
def test_a_slice_selects_what_python_selects(count, start, stop, step, short):
    def text(number):
        return "" if number is None else str(number)

    short = short and step is None
    inside = f"{text(start)}:{text(stop)}" + ("" if short else f":{text(step)}")
    expected = range(count)[start:stop:step]
    if expected:
        assert covered(f"@blocks[{inside}] : int8", count) == sorted(expected)
        return
    with pytest.raises(PolicyError) as caught:
        covered(f"@blocks[{inside}] : int8", count)
    assert caught.value.facts == {"alias": "@blocks", "count": count}


@given(st.integers(1, 12), st.integers(-14, 14))
def test_an_index_selects_what_python_selects(count, index):
    if -count <= index < count:
        assert covered(f"@blocks[{index}] : int8", count) == [range(count)[index]]
        return
    with pytest.raises(PolicyError, match=rf"'@blocks\[{index}\]' selects none of the {count} modules of @blocks: "):
        covered(f"@blocks[{index}] : int8", count)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 400))
def test_a_range_matches_the_numbers_in_it(one, other, number):
    low, high = min(one, other), max(one, other)
    inside = low <= number <= high
    assert Pattern.parse(f"blocks.[{low}-{high}]").matches(f"blocks.{number}") == inside
    assert Pattern.parse(f"*.[{low}-{high}].*.[{low}-{high}]").matches(f"a.999.{number}.b.{number}") == inside
    assert Pattern.parse(f"block[{low}-{high}]").covers(f"block{number}.attn") == inside


@given(
    st.from_regex(r"@(blocks|mlp)(\[(-?[0-9]{1,3})?:(-?[0-9]{1,3})?(:[1-9])?\])?(\.[a-z]{1,3})?(/q)?", fullmatch=True)
)
def test_a_pattern_with_a_slice_is_text_and_a_value(text):
    policy = Rules([(text, INT8)], default=Encode(Int8(group=64)))
    assert Rules.parse(str(policy)) == policy == pickle.loads(pickle.dumps(policy))
    assert hash(Rules.parse(str(policy))) == hash(policy)
    assert policy.rules == ((text, INT8),)
    assert str(Pattern.parse(text)) == text


NAMES = {
    "@blocks[::2] : int8": ["model.layers.0", "model.layers.2"],
    "@blocks[-2:] : int8": ["model.layers.2", "model.layers.3"],
    "@blocks[3] : int8": ["model.layers.3"],
    "@blocks[:] : int8": ["model.layers.*"],
    "@blocks[::2].attn : int8": ["model.layers.0.attn", "model.layers.2.attn"],
    "@mlp[1:3] : int8": ["model.layers.1.mlp", "model.layers.2.mlp"],
    "@mlp[-1]/hidden : int8": ["model.layers.3.mlp/hidden"],
    "@blocks[0:2] : int8; @blocks[1:] : keep": ["model.layers.0", "model.layers.1", "model.layers.2", "model.layers.3"],
    "@blocks[0]:int8;@blocks : keep": ["model.layers.0", "model.layers.*"],
    "model.layers.[0-2] : int8": ["model.layers.[0-2]"],
}


@pytest.mark.parametrize("text", NAMES)
def test_a_slice_stands_for_names(text):
    assert [pattern for pattern, _ in expand(Rules.parse(text), model(4)).rules] == NAMES[text]


def test_names_stand_in_the_order_of_the_model():
    found = expand(Rules.parse("@blocks[8:12] : int8"), model(14))
    assert [pattern for pattern, _ in found.rules] == [f"model.layers.{i}" for i in (8, 9, 10, 11)]


def test_the_blocks_of_an_encoder_and_a_decoder_count_on():
    halves = {
        name: nn.ModuleDict({"block": nn.ModuleList(Layer() for _ in range(3))}) for name in ("encoder", "decoder")
    }
    net = nn.ModuleDict(halves)
    found = expand(Rules.parse("@blocks[2:5] : int8"), net)
    assert [pattern for pattern, _ in found.rules] == ["encoder.block.2", "decoder.block.0", "decoder.block.1"]
    assert [pattern for pattern, _ in expand(Rules.parse("encoder : keep; @blocks : int8"), net).rules] == [
        "encoder",
        "decoder.block.*",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("@blocks[4:] : int8", r"'@blocks\[4:\]' selects none of the 4 modules of @blocks: "
         r"model\.layers\.0 to model\.layers\.3"),
        ("@blocks[0-3] : int8", r"column 1: '@blocks\[0-3\]': the brackets must hold a slice or an index as in Python"),
        ("@blocks[] : int8", r"'@blocks\[\]': the brackets must hold"),
        ("@blocks[::0] : int8", r"'@blocks\[::0\]': the brackets must hold"),
        ("@blocks[0 : 2] : int8", r"'@blocks\[0 : 2\]': the brackets must hold .* without blanks"),
        ("@blocks[a] : int8", r"'@blocks\[a\]': the brackets must hold"),
        ("@blocks[0]x : int8", r"'@blocks\[0\]x' is an unknown alias"),
        ("@block[0] : int8", "'@block' is an unknown alias. Did you mean '@blocks'"),
        ("model.layers.[3-1] : int8", r"'\[3-1\]': a range must count up"),
        (f"model.layers.[0-{MOST + 1}] : int8", rf"'\[0-{MOST + 1}\]': a range must count up, to {MOST} at most"),
        ("@blocks : keep; @blocks[0] : int8", r"rule 'model\.layers\.0 : int8' can never apply"),
        ("model.layers.[4-9] : int8", r"'model\.layers\.\[4-9\]' matches no module of the model. Did you mean "
         r"'model\.layers\.0' or 'model\.layers\.3'\?"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(text, words):
    with pytest.raises(PolicyError, match=words):
        ActivationStore(model(4), text)


def test_a_slice_needs_a_model():
    with pytest.raises(PolicyError, match="no model was given"):
        ActivationStore(policy="@blocks[::2] : int8")


def test_what_is_near_to_a_range():
    names = ["model.layers.0", "model.layers.1.mlp"]
    assert near_modules("layers.[0-3].mlp", names) == ["model.layers.*.mlp"]


@pytest.mark.parametrize(
    ("text", "again"), [("@blocks[::2] : recompute", [0, 2]), ("model.layers.[1-2] : recompute", [1, 2])]
)
def test_a_store_recomputes_the_blocks_that_a_slice_selects(text, again):
    net = model(4)
    runs = [0] * 4
    handles = [
        layer.attn.register_forward_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
        for i, layer in enumerate(net["model"]["layers"])
    ]
    x = torch.randn(64, 1)

    def loss():
        y = x
        for layer in net["model"]["layers"]:
            y = layer(y)
        return y.square().sum()

    loss().backward()
    plain = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    runs[:] = [0] * 4
    store = ActivationStore(net, text, min_bytes=0)
    with store:
        value = loss()
    value.backward()
    for handle in handles:
        handle.remove()
    assert [i for i, count in enumerate(runs) if count == 2] == again
    assert all(map(torch.equal, plain, [p.grad for p in net.parameters() if p.grad is not None]))
    net.zero_grad()
    assert {pattern for pattern, _ in Rules.parse(str(store.policy)).rules} == {
        pattern for pattern, _ in store.policy.rules
    }
    assert store.policy.decide("model.layers.2") == Recompute()
