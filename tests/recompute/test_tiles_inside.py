"""``recompute(tiles=n)`` inside of recomputed blocks: the block runs again, and its MLP slice by slice."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from actstore import ActivationStore
from actstore.base.checkpoints import innermost_pack
from actstore.devices import cpu_memory
from actstore.errors import PolicyError, StateError
from actstore.recompute import running, tiles
from tests.recompute.regions import Runs

WIDTH, TOKENS = 16, 40
TILES = "*.mlp : recompute(tiles=4)"


class Mlp(nn.Module):
    def __init__(self, activation, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation, self.tokens = activation, Runs()

    def forward(self, x):
        self.tokens.append(x.shape[-2])
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """Attention with dropout and a buffer that each forward writes to, then `function` of the block and its input."""

    def __init__(self, function, activation, width=WIDTH):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(width), nn.Linear(width, 3 * width), Mlp(activation, width)
        self.function = function
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        q, k, v = self.attn(x).unflatten(-1, (6, -1)).transpose(1, 2).chunk(3, 1)
        x = x + F.dropout(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), 0.2) * float(self.steps)
        return self.function(self, x)


BLOCKS = {
    "last": lambda self, x: x + self.mlp(self.norm(x)),
    "before a norm": lambda self, x: self.norm(x + self.mlp(x)),
    "before dropout": lambda self, x: x + F.dropout(self.mlp(self.norm(x)), 0.3) * 2,
    "twice": lambda self, x: self.mlp(self.norm(x + self.mlp(x)).relu()),
    "of what changes later": lambda self, x: x + (self.mlp(h := self.norm(x)) * h),
    "by keyword": lambda self, x: x + self.mlp(x=self.norm(x)),
    "in place": lambda self, x: self.mlp(self.norm(x)).mul_(2).add_(x),
}


class Model(nn.Module):
    def __init__(self, function=BLOCKS["last"], activation=F.gelu, blocks=2, width=WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(function, activation, width) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def step(model, policy, *, way="usual", dtype=torch.float32, autocast=False, steps=2):
    """All that some steps leave: outputs, gradients, buffers, states of the generators; and the store."""
    model = copy.deepcopy(model).to(dtype)
    store = ActivationStore(model, policy, min_bytes=0)
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(3, TOKENS, WIDTH, dtype=dtype, requires_grad=way != "fixed input")
        twice = sdpa_kernel(SDPBackend.MATH) if way == "differentiated twice" else nullcontext()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), twice, store:
            losses = [model(x).float().square().mean() for _ in range(2 if way == "two at once" else 1)]
            if way == "inside":
                losses[0].backward()
        if way == "retained":
            losses[0].backward(retain_graph=True)
        if way == "differentiated twice":
            (grad,) = torch.autograd.grad(losses[0], x, create_graph=True)
            grad.square().sum().backward()
        elif way == "of some":
            found += torch.autograd.grad(losses[0], [*model.parameters()][::3])
        elif way != "inside":
            for loss in reversed(losses):
                loss.backward()
        grads = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
        found += [*(loss.detach() for loss in losses), *(grad.clone() for grad in grads), *model.buffers()]
        found.append(torch.get_rng_state().float())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * (0 if p.grad is None else p.grad)
    assert innermost_pack() is None
    assert running.current() is None
    losses = loss = grad = None  # they hold the graph
    assert store.report().live_bytes == 0
    return found, model, store


def check_close(found, wanted, allowed=2e-6):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= allowed * (other.norm() + 1e-6), (one, other)


@pytest.mark.parametrize("blocks", ["recompute", "recompute(raw @ disk)", "recompute(segment=2)", "recompute(first=1)"])
@pytest.mark.parametrize("name", BLOCKS)
def test_all_that_training_leaves_is_that_without_tiles_but_for_rounding(name, blocks):
    model = Model(BLOCKS[name])
    rules = f"blocks.* : {blocks}"
    wanted, _, _ = step(model, rules)
    check_close(step(model, f"{TILES}; {rules}")[0], wanted)
    check_close(step(model, "keep")[0], wanted)


@pytest.mark.parametrize("name", ["last", "twice"])
def test_the_number_of_slices_may_be_chosen(name, monkeypatch):
    monkeypatch.setattr(tiles, "AUTO_TOKENS", 8)
    model = Model(BLOCKS[name])  # the MLP is four times as wide as its input
    found, wanted = (step(model, f"*.mlp : recompute(tiles={n}); blocks.* : recompute") for n in ("auto", 4))
    assert all(map(torch.equal, found[0], wanted[0]))
    assert [block.mlp.tokens[-1] for block in found[1].blocks] == [10, 10]


WAYS = "inside", "retained", "two at once", "differentiated twice", "of some", "fixed input"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["last", "twice"])
def test_ways_to_train(name, way):
    model = Model(BLOCKS[name])
    wanted, _, _ = step(model, "blocks.* : recompute", way=way)
    check_close(step(model, f"{TILES}; blocks.* : recompute", way=way)[0], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_and_narrow_dtypes(dtype):
    model = Model()
    options = {"dtype": dtype, "autocast": dtype is torch.float32}
    wanted, _, _ = step(model, "blocks.* : recompute", **options)
    check_close(step(model, f"{TILES}; blocks.* : recompute", **options)[0], wanted, 0.03)


@pytest.mark.parametrize(
    "others",
    ["*.attn : raw @ disk", "*.attn : int8", "blocks.*/@sdpa : raw", "blocks.*/@norm : expack", "blocks.0.norm : keep"],
)
@pytest.mark.parametrize("name", BLOCKS)
def test_other_rules_for_parts_and_operators_of_the_block(others, name):
    model = Model(BLOCKS[name])
    rules = f"{others}; blocks.* : recompute"
    wanted, _, _ = step(model, rules)
    check_close(step(model, f"{TILES}; {rules}")[0], wanted)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(), nn.Hardtanh(), nn.ReLU(inplace=True)], ids=str)
@pytest.mark.parametrize("name", ["last", "before a norm", "twice"])
def test_inexact_inputs_of_the_block_repeat_decisions(name, activation):
    model = Model(BLOCKS[name], activation)
    for rules in ("blocks.* : recompute(int4)", "blocks.*/@sdpa : int4; blocks.* : recompute"):
        wanted, _, _ = step(model, rules, steps=1)
        check_close(step(model, f"{TILES}; {rules}", steps=1)[0], wanted)
        assert (step(model, f"{TILES}; {rules}", steps=1)[0][1] - step(model, "keep", steps=1)[0][1]).norm() > 1e-7


def test_slices_run_once_in_forward_and_once_in_backward():
    """Where backward needs nothing after the MLP, the block's second run ends before it."""
    cases = ("last", "recompute", 8), ("last", "recompute(int8)", 8), ("before a norm", "recompute", 12)
    for name, blocks, calls in cases:
        model = Model(BLOCKS[name], nn.ReLU(), blocks=1)
        _, model, _ = step(model, f"{TILES}; blocks.* : {blocks}", steps=1)
        assert model.blocks[0].mlp.tokens == [10, 8, 4, 4, *[10] * calls]


def test_the_store_may_be_entered_in_backward_and_the_module_run_alone():
    model = Model()
    policy = f"{TILES}; blocks.* : recompute"
    store = ActivationStore(model, policy, min_bytes=0)
    x = torch.randn(3, TOKENS, WIDTH, requires_grad=True)
    with store:
        loss = model.blocks[0].mlp(x).square().mean()
        loss.backward()
    found = x.grad.clone()
    x.grad = None
    model.blocks[0].mlp(x).square().mean().backward()
    check_close([found], [x.grad])
    assert "blocks.0.mlp" in str(store.report())


def test_a_checkpoint_of_the_models_own_around_the_module():
    model = Model(lambda self, x: x + checkpoint(self.mlp, self.norm(x), use_reentrant=False))
    wanted, _, _ = step(Model(), "blocks.* : recompute")
    with pytest.warns(RuntimeWarning, match="inside a checkpoint of its own, so that the rule has no effect"):
        check_close(step(model, f"{TILES}; blocks.* : recompute")[0], wanted)


class Failure(Exception):
    pass


@pytest.mark.parametrize("call", range(4, 4 + 12, 3))
@pytest.mark.parametrize("blocks", ["recompute", "recompute(int8)"])
def test_an_error_leaves_nothing(call, blocks):
    """In the first run, in the block's second run, and in that of a slice."""
    model = Model(BLOCKS["before a norm"], blocks=1)
    calls = Runs()

    def fail(module, args):
        calls.append(args[0].shape)
        if len(calls) == call + 1:
            raise Failure

    hook = model.blocks[0].mlp.up.register_forward_pre_hook(fail)
    store = ActivationStore(model, f"{TILES}; blocks.* : {blocks}", min_bytes=0)
    x = torch.randn(3, TOKENS, WIDTH, requires_grad=True)

    def train():
        with store:
            loss = model(x).square().mean()
        loss.backward()

    with pytest.raises(Failure):
        train()
    assert innermost_pack() is None
    assert running.current() is None
    assert "forward" not in vars(model.blocks[0].mlp)
    hook.remove()
    model.zero_grad()
    model.blocks[0].steps.zero_()
    wanted, _, _ = step(model, f"{TILES}; blocks.* : {blocks}")
    check_close(wanted, step(model, f"blocks.* : {blocks}")[0])


MIXED = {
    "attention": (
        lambda h: F.scaled_dot_product_attention(h, h, h),
        r"blocks.0.mlp \(recompute\(tiles=4\)\): .* at .*:\d+",
    ),
    "dropout": (lambda h: F.dropout(h, 0.1), "bernoulli|dropout.*Leave tiles out here"),
    "a sum": (lambda h: h.sum(-2), "computes with a sum over tokens"),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_tokens_is_refused_by_name(name):
    function, words = MIXED[name]
    model = Model(activation=function)
    store = ActivationStore(model, f"{TILES}; blocks.* : recompute", min_bytes=0)
    state = torch.get_rng_state()
    with pytest.raises(StateError, match=words), store:
        model(torch.randn(3, TOKENS, WIDTH, requires_grad=True))
    assert innermost_pack() is None
    torch.set_rng_state(state)


def test_a_loss_in_tiles_inside_a_region_is_refused():
    model = Model(lambda self, x: self.mlp(x).square().sum(), blocks=1)
    model.blocks[0].mlp.forward = lambda x: x.square().sum()
    store = ActivationStore(model, f"{TILES}; blocks.* : recompute", min_bytes=0)
    with (
        pytest.raises(StateError, match=r"blocks.0.mlp .*returns sums over tokens inside .*blocks.0.*write 'blocks"),
        store,
    ):
        model(torch.randn(3, TOKENS, WIDTH, requires_grad=True))


def test_what_the_module_has_saved_is_not_read_in_forward():
    def early(self, x):
        y = self.mlp(x)
        return y * torch.autograd.grad(y.sum(), x, retain_graph=True)[0]

    model = Model(early)
    store = ActivationStore(model, f"{TILES}; blocks.* : recompute", min_bytes=0)
    with (
        pytest.raises(StateError, match=r"What runs once or in tiles is not complete then\. Read it after the forward"),
        store,
    ):
        model(torch.randn(3, TOKENS, WIDTH, requires_grad=True))
    assert innermost_pack() is None


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("*.mlp : recompute(int8, tiles=4); blocks.* : recompute", r"none is stored. Write recompute\(tiles=4\)\."),
        ("*.mlp : recompute; blocks.* : recompute", "runs again as a whole"),
        ("*.up : keep; *.mlp : recompute(tiles=4); blocks.* : recompute", "blocks.0.mlp holds blocks.0.mlp.up"),
        ("*.up : recompute(tiles=2); *.mlp : recompute(tiles=4)", "the region runs in tiles as a whole. Leave"),
        ("*/@matmul : raw; *.mlp : recompute(tiles=4); blocks.* : recompute", "Put '.*.mlp : .*' before it"),
        (
            "*/q : raw; *.mlp : recompute(tiles=4); blocks.* : recompute",
            "is also for blocks.0.mlp, which runs in tiles",
        ),
    ],
)
def test_rules_that_cannot_hold_are_refused_when_the_store_is_made(policy, words):
    with pytest.raises(PolicyError, match=words):
        ActivationStore(Model(), policy)


def test_it_is_explained_and_reported():
    _, _, store = step(Model(), f"{TILES}; blocks.* : recompute")
    assert "*.mlp : recompute(tiles=4)  runs in tiles inside of recomputed modules: blocks.0-1.mlp" in store.explain()
    sites = {site.site: site for site in store.report().sites}
    assert sites["blocks.0.mlp[0]"].saved_bytes > 0
    assert sites["blocks.0.mlp[0]"].held_bytes == 0
    assert "tiles" not in str(store.report().advice)


@pytest.mark.skipif(not cpu_memory.count(), reason="the bytes of CPU tensors cannot be counted here")
def test_the_peak_of_a_step_falls():
    peaks, reported = {}, {}
    for policy in ("blocks.* : recompute", f"{TILES}; blocks.* : recompute".replace("=4", "=8")):
        model = Model(width=64)
        x = torch.randn(1, 2048, 64, requires_grad=True)
        with ActivationStore(model, policy) as store:
            model(x).sum().backward()
        model.zero_grad()
        cpu_memory.reset_peak()
        before = cpu_memory.max_memory_allocated()
        with store:
            loss = model(x).square().mean()
        loss.backward()
        peaks[policy] = cpu_memory.max_memory_allocated() - before
        report = store.report()
        reported[policy] = report.peak_held_bytes
    whole, sliced = peaks.values()
    assert sliced < 0.7 * whole
    whole, sliced = reported.values()
    assert sliced < 0.7 * whole
    saved = {site.site: site.saved_bytes for site in report.sites}
    least = report.held_bytes + saved["blocks.1[0]"] - x.nbytes + saved["blocks.1.mlp[0]"] / 8
    assert sliced >= least  # what the block has saved exists while a slice runs again
    for policy, peak in peaks.items():
        assert reported[policy] < 1.1 * peak


def test_saved_bytes_are_those_of_plain_autograd():
    """Copies of slices, which are not contiguous, count as little as those that no store sees."""
    saved = [
        step(Model(), policy, steps=1)[2].report().saved_bytes for policy in ("keep", f"{TILES}; blocks.* : recompute")
    ]
    assert saved[0] == saved[1]
