"""Mixtures of experts in a recomputed region: no token takes another expert in the second run."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

from actstore import ActivationStore
from actstore.errors import StateError
from actstore.recompute import recomputed_module
from actstore.recompute.operators import routes
from tests.recompute.regions import (
    Mixture,
    Runs,
    batch,
    error_of,
    gradients,
    rerouted,
)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("by_index", [False, True], ids=["all tokens", "by index"])
def test_no_token_takes_another_expert(by_index, codec):
    x = batch(shape=(512, 16))
    model = Mixture(by_index)
    wanted = gradients(model, x)
    found = {}
    for policy in (codec, f"blocks.* : recompute({codec})", f"blocks.* : recompute({codec}, decisions=anew)"):
        for block in model.blocks:
            block.chosen.clear()
        try:
            found[policy] = error_of(gradients(model, x, ActivationStore(model, policy, min_bytes=0)), wanted)
        except StateError:
            continue
        if policy != codec:
            assert (rerouted(model) > 0) == ("anew" in policy)
    plain, kept, *anew = found.values()
    assert kept < 1.5 * plain
    assert len(anew) == (not by_index)


class Gate(nn.Module):
    """A router whose kernel adds other rounding errors in each run: here the tokens are ties."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear, self.modes, self.runs = kind, nn.Linear(16, 8, bias=False), Runs(), Runs()

    def forward(self, h):
        self.modes.append(_len_torch_dispatch_stack())
        logits = self.linear(0 * h)
        self.runs.append(len(self.runs))
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(len(self.runs)))
        probabilities = (logits + 1e-7 * noise).softmax(-1)
        if self.kind == "topk":
            return probabilities.topk(2)
        if self.kind == "no grad":
            with torch.no_grad():
                chosen = probabilities.topk(2).indices
        else:
            chosen = probabilities.argmax(-1, keepdim=True)
        return probabilities.gather(-1, chosen), chosen


class Gated(nn.Module):
    def __init__(self, kind, inline):
        super().__init__()
        self.gate = Gate(kind)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(8))
        self.inline, self.modes, self.chosen = inline, Runs(), Runs()

    def forward(self, x):
        weights, chosen = Gate.forward(self.gate, x) if self.inline else self.gate(x)
        self.chosen.append(chosen.clone())
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            self.modes.append(_len_torch_dispatch_stack())
            token, slot = torch.where(chosen == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return x + out


@pytest.fixture
def never_compiled(monkeypatch):
    """Earlier tests may have called torch.compile."""
    monkeypatch.setattr(recomputed_module, "compiles", bool)


def same_choices(runs):
    return len(runs) > 1 and all(torch.equal(each, runs[0]) for each in runs)


@pytest.mark.parametrize("policy", ["recompute", "recompute(segment=2)", "recompute(raw)"])
@pytest.mark.parametrize("kind", ["topk", "no grad", "argmax"])
def test_routing_is_kept_without_a_setting(kind, policy, never_compiled):
    """Kernels that differ from run to run would reroute each token. What runs below a mode may compute other bits."""
    torch.manual_seed(0)
    model = Mixture(True)
    model.blocks = nn.ModuleList(Gated(kind, inline=False) for _ in range(4))
    store = ActivationStore(model, f"blocks.* : {policy}", min_bytes=0)
    for _ in range(3):
        for block in model.blocks:
            for notes in (block.chosen, block.gate.modes, block.modes):
                notes.clear()
        gradients(model, batch(shape=(64, 16)), store)
        assert all(same_choices(block.chosen) for block in model.blocks)
        assert {n for block in model.blocks for n in (*block.gate.modes, *block.modes)} == {0}
    assert f"decisions of {'argmax' if kind == 'argmax' else 'topk'} keep" in str(store.report().sites)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_block_that_routes_itself_keeps_its_routing(never_compiled):
    torch.manual_seed(0)
    model = nn.ModuleDict({"block": Gated("topk", inline=True)})
    model.forward = lambda x: model["block"](x * 1)
    store = ActivationStore(model, "block : recompute", min_bytes=0)
    for _ in range(2):
        model["block"].chosen.clear()
        with store:
            loss = model.forward(batch(shape=(64, 16))).sum()
        loss.backward()
        first, second = model["block"].chosen
        assert torch.equal(first, second)
    assert "decisions of topk keep" in str(store.report().sites)


def test_a_block_without_a_router_runs_below_no_mode_after_its_first_call(never_compiled):
    seen = []

    class Seen(nn.ReLU):
        def forward(self, x):
            seen.append((_len_torch_dispatch_stack(), _len_torch_function_stack()))
            return super().forward(x)

    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16), Seen(), nn.Linear(16, 16), nn.Tanh()))
    store = ActivationStore(model, "0 : recompute", min_bytes=0)
    for _ in range(2):
        with store:
            loss = model(batch(shape=(4, 16)).requires_grad_()).sum()
        loss.backward()
    assert seen == [(0, 1), (0, 0), (0, 0), (0, 0)]
    assert not any("decisions" in (site.note or "") for site in store.report().sites)


def test_only_operators_that_choose_by_rank_route():
    aten, higher = torch.ops.aten, torch.ops.higher_order
    assert all(map(routes, [aten.topk.default, aten.argmax.default, aten.sort.stable, aten.multinomial.default]))
    assert not any(map(routes, [aten.relu.default, aten.max.dim, higher.flex_attention, higher.cond]))


def test_decisions_anew_are_made_anew():
    torch.manual_seed(0)
    model = nn.Sequential(Gated("topk", inline=False))
    store = ActivationStore(model, "0 : recompute(decisions=anew)", min_bytes=0)
    with store:
        loss = model(batch(shape=(64, 16))).sum()
    with pytest.raises(StateError, match="goes another way"):
        loss.backward()


def test_the_compiler_is_not_imported():
    """That takes seconds, and hooks of modules then stay for compiled code."""
    text = """
import sys, torch
from torch import nn
from actstore import ActivationStore
model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()))
store = ActivationStore(model, "1 : recompute", min_bytes=0)
with store:
    loss = model(torch.randn(4, 8)).sum()
loss.backward()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", text], check=True)
