"""Forecasts of peaks: bytes that units share, that a module of several units saves, and that no hook sees."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from actstore import ActivationStore, Auto, make_plan
from actstore.errors import CapacityError
from actstore.plan.profile import SharedBytes

pytestmark = pytest.mark.usefixtures("one_thread")


class Rectified(nn.Module):
    """Blocks whose last activation saves its result, which the next block saves, too: its bytes count once."""

    def __init__(self):
        super().__init__()
        widths = zip((16, 128, 64, 128, 32), (128, 64, 128, 32, 128), strict=True)
        layers = ((nn.Linear(a, 2 * b), nn.ReLU(), nn.Linear(2 * b, b), nn.ReLU()) for a, b in widths)
        self.blocks = nn.ModuleList([nn.Sequential(*each) for each in layers])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class OneActivation(nn.Module):
    """Blocks that share one module without weights, of the model's own class: rules name it in the first one alone."""

    class Smooth(nn.Module):
        def forward(self, x):
            return functional.gelu(x) * torch.sigmoid(x)

    class Block(nn.Module):
        def __init__(self, activation):
            super().__init__()
            self.a, self.act, self.b = nn.Linear(16, 64), activation, nn.Linear(64, 16)

        def forward(self, x):
            return x + self.b(self.act(self.a(x)))

    def __init__(self):
        super().__init__()
        activation = OneActivation.Smooth()
        self.blocks = nn.ModuleList([OneActivation.Block(activation) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Bypassed(nn.Module):
    """Calls `forward` of some blocks itself, so that no hook of theirs runs."""

    def __init__(self):
        super().__init__()
        self.blocks, self.heads = (
            nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(number)])
            for number in (4, 3)
        )

    def forward(self, x):
        x = self.blocks[0](x)
        for block, head in zip(self.blocks[1:], self.heads, strict=True):
            x = block(x) + head.forward(x)
        return x.square().mean()


class Between(nn.Module):
    """Units with activations between their layers: who counts them first depends on the decision."""

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 16)

        def forward(self, x):
            return self.c(functional.relu(self.b(functional.relu(self.a(x)))))

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (Between.Mlp() for _ in range(3))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)])

    def forward(self, x):
        x = self.three(self.two(self.one(x)))
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Sliced(nn.Module):
    """Blocks that get slices of one table, which the model keeps as a plain attribute."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x, scale):
            return x + self.b(torch.tanh(self.a(x)) * scale)

    def __init__(self):
        super().__init__()
        self.blocks, self.table = nn.ModuleList([Sliced.Block() for _ in range(3)]), torch.rand(2048, 64)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.table[: len(x)])
        return x.square().mean()


class Unread(nn.Module):
    """Layers whose results nothing reads, before others of their class: forward alone holds their bytes."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (
            nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)])
            for _ in range(2)
        )

    def forward(self, x):
        unread = x
        for layer in self.encoder:
            unread = layer(unread)
        for layer in self.decoder:
            x = x + layer(x)
        return x.square().mean()


class Hidden(nn.Module):
    """Blocks with a matrix product that autograd's graph does not show."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * (x[:128] @ x.T).mean()

        @staticmethod
        def backward(ctx, grad):
            return grad * (ctx.saved_tensors[0][:128] @ ctx.saved_tensors[0].T).mean()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return x + self.b(torch.tanh(Hidden.Product.apply(self.a(x))))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Hidden.Block() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def peak_of(model, store):
    """Train a step; return its peak in bytes."""
    x = torch.randn(256, 16)
    with store:
        loss = model(x)
    loss.backward()
    model.zero_grad()
    return store.report().peak_held_bytes


@pytest.mark.parametrize("share", [0.5, 0.6, 0.9])
@pytest.mark.parametrize("make", [Rectified, OneActivation, Bypassed, Between, Sliced, Unread, Hidden])
def test_no_step_after_the_first_exceeds_the_budget(make, share):
    torch.manual_seed(0)
    model = make()
    budget = int(share * peak_of(model, ActivationStore(model, "keep", min_bytes=0)))
    store, peaks = ActivationStore(model, Auto(budget), min_bytes=0), []
    try:
        peaks.extend(peak_of(model, store) for _ in range(45))
    except CapacityError:
        assert len(peaks) == 1
        assert peaks[0] > budget
    else:
        assert max(peaks[1:]) <= budget


def test_a_later_unit_holds_what_the_first_one_drops():
    shared = SharedBytes(("a", "b", "c"), (("",), ("",), ()), (False, False, True), 8)
    assert shared.spilled({}) is None
    assert shared.spilled({"a": "recompute"}) == "b"
    assert shared.spilled({"a": "recompute", "b": "recompute", "c": "recompute"}) == "c"
    assert shared.spilled({"a": "recompute", "b": "recompute"}) is None
    assert shared.spilled({"a": "derive"}) == "b"
    known = SharedBytes(shared.units, shared.parts, shared.inputs, 8, ({"derive": True}, {"expack": False}, {}))
    assert known.spilled({"a": "derive"}) is None
    assert known.spilled({"a": "recompute", "b": "expack"}) is None


def test_a_module_of_several_blocks_counts_where_it_is_called():
    model = OneActivation()
    store = ActivationStore(model, "blocks.1.* : int8", min_bytes=0)
    peak_of(model, store)
    saved = {row.module: row.saved for row in store.report().modules}
    assert saved["blocks.0.act"] == saved["blocks.1.act"] == saved["blocks.2.act"] > 0


class Repeated(nn.Module):
    """Calls one network again and again, on a residual stream."""

    def __init__(self):
        super().__init__()
        self.net, self.head = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), nn.Linear(64, 64)

    def forward(self, x):
        for _ in range(4):
            x = x + self.net(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("share", [0.7, 0.8, 0.9])
def test_units_that_run_several_times_have_all_measured_decisions(share):
    """Of the last layer only `derive` was measured, which was no option; decisions that fit in part were tried on."""
    model, x, peaks = Repeated(), torch.randn(128, 64), []
    with ActivationStore(model, "keep", min_bytes=0) as store:
        loss = model(x)
    loss.backward()
    budget = int(share * store.report().peak_held_bytes)

    def step(store):
        with store:
            loss = model(x)
        loss.backward()
        peaks.append(store.report().peak_held_bytes)

    plan = make_plan(model, step, budget, min_bytes=0)
    assert plan.profile.steps < 20
    assert max(peaks) <= budget


class Dropped(nn.Module):
    """Leaves out a layer of the first steps, as models do that drop layers at random."""

    def __init__(self, kept):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)])
        self.steps = iter(kept)

    def forward(self, x):
        for index in next(self.steps, range(3)):
            x = x + self.layers[index](x)
        return x.square().mean()


@pytest.mark.parametrize("kept", [[[0, 2]], [[0, 1], [1, 2], [0, 2]], [[1, 2], [0]]])
def test_a_layer_that_the_first_steps_leave_out_is_expected(kept):
    whole = Dropped([])
    budget = int(0.75 * peak_of(whole, ActivationStore(whole, "keep", min_bytes=0)))
    model = Dropped(kept)
    store = ActivationStore(model, Auto(budget), min_bytes=0)
    assert max(peak_of(model, store) for _ in range(30)) <= budget
    assert store.plan is not None
    assert "measured again" not in str(store.plan)
