"""Fits of long contexts: tiles among the policies, the largest context of all, and what sets the peak."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import actstore
from actstore import fit_step
from actstore.bench import workloads
from actstore.bench.workloads.gpt import GPT
from actstore.bench.workloads.llama import Llama
from actstore.devices import cpu_memory
from actstore.errors import CapacityError, ConfigError
from tests.inspection.steps_to_fit import make_mlp, measured

pytestmark = pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")

BLOCKS, LOSS = "@blocks : recompute", "loss : recompute(tiles=16)"
INSIDE = "@mlp : recompute(tiles=8); @blocks : recompute"
TOLERANCE = 0.03
VOCABULARY = 4096


class Loss(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, hidden, labels):
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Language(nn.Module):
    """A model whose loss is a module, or in its own forward."""

    def __init__(self, name, context, run=None, layers=2):
        super().__init__()
        work = workloads.sized(name, layers=layers, batch=1, context=context, width=64, heads=2, threads=1)
        trunk = {"gpt": GPT, "llama": Llama}[name](work)
        self.words, self.blocks, self.norm = nn.Embedding(VOCABULARY, work.width), trunk.blocks, trunk.norm
        self.loss = Loss(work.width)
        self.run = run

    def forward(self, x, y):
        hidden = self.words(x)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return self.loss(hidden, y) if self.run is None else self.run(self.loss.head, hidden, y)


def inline(head, hidden, y):
    return F.cross_entropy(head(hidden).flatten(0, 1), y.flatten())


def in_tiles(head, hidden, y):
    return actstore.tile(lambda h, y: inline(head, h, y), tiles=16)(hidden, y)


def maker(name, run=None, layers=2):
    def make_step(context=256):
        torch.manual_seed(0)
        model = Language(name, context, run, layers)
        x, y = torch.randint(VOCABULARY, (2, 1, context))
        return model, lambda: model(x, y)

    return make_step


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("llama", 512),
        *(pytest.param(name, context, marks=pytest.mark.slow) for name in ("gpt", "llama") for context in (256, 2048)),
    ],
)
def test_predicted_peaks_with_tiles_are_those_of_the_allocator(name, context):
    make_step = maker(name)
    rows = fit_step(make_step, [BLOCKS, f"{LOSS}; {BLOCKS}", f"{LOSS}; {INSIDE}"], context=context).rows
    assert rows[2].peak_bytes < 0.8 * rows[1].peak_bytes
    for row in rows:
        assert abs(row.peak_bytes / measured(make_step, row.policy, context=context) - 1) < TOLERANCE, row.policy


def test_the_largest_context_of_all_has_tiles_and_fits():
    make_step, memory = maker("llama", layers=1), 20 << 20
    found = fit_step(make_step, memory=memory, context="auto")
    largest = {policy: sizes["context"] for policy, sizes in found.largest.items()}
    assert list(largest) == ["plain", "recompute", f"{LOSS}; {BLOCKS}", f"{LOSS}; {INSIDE}"]
    best = found.best.policy
    most = largest[best]
    assert most == max(largest.values()) > 2 * largest["recompute"]
    assert found.best.peak_bytes <= memory
    assert measured(make_step, best, context=most) <= (1 + TOLERANCE) * memory
    assert measured(make_step, best, context=round(1.1 * most)) > memory
    assert found.best.ms[0] > 0
    text = " ".join(str(found).split())
    assert f"largest context: {most}, under '{best}'; a step needs " in text
    assert f"most of it at {found.best.peak_at}; it takes " in text
    assert found.advice == ""
    assert found.rows[0].ms is None


def test_given_policies_are_searched_alone():
    found = fit_step(maker("llama", layers=1), ["recompute"], memory="32MiB", context="auto")
    assert list(found.largest) == ["plain", "recompute"]
    assert found.best.policy == max(found.largest, key=lambda policy: found.largest[policy]["context"])
    assert f"Tiles need less: '{LOSS}; " in found.advice


def test_no_context_fits():
    found = fit_step(maker("llama"), [], memory="1MiB", context="auto")
    assert found.largest == {"plain": {"context": 0}}
    assert found.best is None


def test_a_plan_that_does_not_fit_names_tiles_and_their_peak():
    make_step = maker("llama")
    with pytest.raises(CapacityError, match="no plan fits into 64") as caught:
        fit_step(make_step, ["auto(64KiB)"], context=512)
    nbytes, policy = re.search(r"In tiles a whole step needs (.*) MiB: '(.*)'\.$", str(caught.value)).groups()
    assert policy == f"{LOSS}; {INSIDE}"
    assert abs(measured(make_step, policy, context=512) / (float(nbytes) * 2**20) - 1) < TOLERANCE
    assert caught.value.facts["least"] > 64 << 10


@pytest.mark.parametrize(
    ("sizes", "memory"),
    [({"batch": "auto"}, None), ({"context": "auto", "batch": "auto"}, "1GiB"), ({"context": "auto"}, "1GiB")],
)
def test_a_size_that_cannot_be_searched_is_refused(sizes, memory):
    with pytest.raises(ConfigError, match='"auto": must be one argument of make_step'):
        fit_step(lambda batch=1: make_mlp(batch), [], memory=memory, **sizes)


def test_a_size_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="context='long': must be a whole number, or \"auto\""):
        fit_step(lambda context=1: make_mlp(context), [], context="long")


def mixing(context=64):
    """Return a model whose feed-forward network mixes tokens."""

    class Mlp(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attn, self.mlp = nn.LayerNorm(64), nn.Identity(), Mlp(64, 64)

        def forward(self, x):
            y = self.norm(x)
            return x + self.mlp(F.scaled_dot_product_attention(y, y, y))

    model, x = nn.Sequential(Block(), Block()), torch.ones(8, context, 64)
    return model, lambda: model(x).square().mean()


def test_tiles_that_a_model_refuses_are_no_candidates():
    assert list(fit_step(mixing, memory="8MiB", context="auto").largest) == ["plain", "recompute", BLOCKS]


@pytest.mark.parametrize(
    ("policy", "context", "moment"),
    [
        ("plain", 1024, "LogSoftmaxBackward0 in loss"),
        (f"{LOSS}; {BLOCKS}", 1024, r"\w+ in blocks\.\d\.\w+(\.\w+)*(, run again)?"),
        (BLOCKS, 64, r"AdamW\.step"),
    ],
)
def test_what_sets_the_peak_is_named(policy, context, moment):
    row = next(
        row for row in fit_step(maker("llama", layers=1), [policy], context=context).rows if row.policy == policy
    )
    assert re.fullmatch(moment, row.peak_at)


def test_a_module_that_runs_again_is_named():
    """One operator in the middle of a module makes the peak: its output is far larger than all else."""

    class Wide(nn.Module):
        def forward(self, x):
            return (x.repeat(64, 1) * 2).sum(0).sin()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.wide, self.last = nn.Linear(512, 512), Wide(), nn.Linear(512, 512)

        def forward(self, x):
            return self.last(self.wide(self.first(x))).mean()

    def make_step():
        return (model := Net()), lambda: model(torch.ones(512, 512))

    row = fit_step(make_step, ["wide : recompute"]).rows[1]
    assert row.peak_at == "mul in wide, run again"


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt", marks=pytest.mark.slow)])
def test_advice_to_run_the_loss_in_tiles_comes_true(name):
    make_step = maker(name)
    found = fit_step(make_step, ["recompute"], context=2048)
    policy, nbytes = re.search("Tiles need less: '(.*)' needs (.*) MiB$", found.advice).groups()
    assert re.match(r"recompute needs least, \S+ MiB, most of it at LogSoftmaxBackward0 in loss\.", found.advice)
    assert "\n".join(str(found).split()).endswith("\n".join(found.advice.split()))
    before, after = (measured(make_step, each, context=2048) for each in ("recompute", policy))
    assert after < 0.9 * before
    assert abs(after / (float(nbytes) * 2**20) - 1) < TOLERANCE


def test_advice_for_a_loss_that_no_rule_reaches_comes_true():
    found = fit_step(maker("llama", inline), ["recompute"], context=1024)
    logits = found.rows[1].at_peak["logits"]
    assert found.advice.endswith(
        f"logits take {logits / 2**20:.1f} MiB of it, and {logits / 2**24:.1f} MiB where the last linear layer and the "
        "loss are a function with @actstore.tile(tiles=16)"
    )
    before, after = (measured(maker("llama", run), "recompute", context=1024) for run in (inline, in_tiles))
    assert before - after > 0.5 * logits


def test_no_advice_where_tiles_lower_nothing():
    assert fit_step(make_mlp, ["int8"]).advice == ""
    assert fit_step(maker("llama"), [f"{LOSS}; {INSIDE}"], context=1024).advice == ""
