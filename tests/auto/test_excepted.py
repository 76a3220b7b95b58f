"""Exceptions from recomputation among the options of "auto"."""

from collections import namedtuple
from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from actstore import ActivationStore, Auto
from actstore.auto.excepted import Separability
from actstore.plan.decisions import except_from_recompute, excepted_part, rules_of
from actstore.plan.profile import UnitBytes, UnitFigures

pytestmark = pytest.mark.usefixtures("one_thread")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(0.1))


class Block(nn.Module):
    def __init__(self, attn=Attention, mlp=Mlp):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(32), attn(), mlp()

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, make=Block):
        super().__init__()
        self.blocks = nn.ModuleList([make() for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


X = torch.randn(16, 32, 32, generator=torch.Generator().manual_seed(0))


def step(model, store):
    with store:
        loss = model(X)
    loss.backward()
    return loss.detach()


def train(policy, steps, make=Block):
    """Losses, weights and peaks of some steps, and the store."""
    torch.manual_seed(0)
    model = Net(make)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    store = ActivationStore(model, policy, min_bytes=0)
    losses, peaks = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(step(model, store))
        optimizer.step()
        peaks.append(store.report().peak_held_bytes)
    return [*losses, *(p.detach() for p in model.parameters())], peaks, store


def same(found, wanted):
    return all(map(torch.equal, found, wanted))


def test_exceptions_are_measured_and_every_step_is_exact():
    wanted, peaks, _ = train("keep", 30)
    budget = int(0.6 * max(peaks))
    found, peaks, store = train(Auto(budget), 30)
    assert same(found, wanted)
    assert max(peaks) <= budget
    (figures,) = (f for kind, f in store.plan.profile.figures.items() if kind.startswith("Block"))
    known = {excepted_part(decision): f for decision, f in figures.items() if excepted_part(decision)}
    assert known.keys() == {"@matmul", "@sdpa", "attn", "mlp"}
    least, most = figures["recompute"].total("held"), figures["keep"].total("held")
    assert all(least < known[what].total("held") < most for what in ("@matmul", "@sdpa", "attn", "mlp"))
    assert all(f.total("saved") == figures["keep"].total("saved") for f in known.values())


@pytest.mark.parametrize("part", ["@matmul", "@sdpa", "attn", "mlp"])
def test_a_plan_with_an_exception_is_exact_and_holds_what_was_measured(part, monkeypatch):
    wanted, peaks, _ = train("keep", 30)
    decision = except_from_recompute(part, "keep")

    def only(_self, *_args, **_options):
        yield decision

    monkeypatch.setattr(Separability, "exceptions", only)
    _, _, store = train(Auto(int(0.6 * max(peaks))), 20)
    (figures,) = (f[decision] for kind, f in store.plan.profile.figures.items() if kind.startswith("Block"))
    text = str(rules_of({f"blocks.{i}": decision for i in range(4)}))
    found, peaks, store = train(text, 30)
    assert same(found, wanted)
    held = sum(site.held_bytes for site in store.report().sites if site.site.startswith("blocks.0"))
    assert held == figures.total("held")
    rest = sum(site.held_bytes for site in store.report().sites if not site.site.startswith("blocks"))
    assert max(peaks) <= rest + 4 * held + figures.transient


Holder = namedtuple("Holder", "value")


class WritesToOption(Mlp):
    def forward(self, x, calls=None):
        if calls is not None:
            calls.append(1)
        return super().forward(x)


class Leaves(Mlp):
    last = None

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Box:
    def __init__(self, value):
        self.value = value


class Returns(Mlp):
    def forward(self, x):
        return Box(super().forward(x))


class Checkpointed(Block):
    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + checkpoint(self.mlp, x, use_reentrant=False)


class Opens(Block):
    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x).value


class Lists(Block):
    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x, calls=[])


class Counts(Mlp):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Pairs(Mlp):
    def forward(self, x):
        return Holder(super().forward(x))


@pytest.mark.parametrize(
    ("make", "separable"),
    [
        (Block, True),
        (lambda: Block(mlp=Counts), True),
        (lambda: Opens(mlp=Pairs), True),
        (lambda: Block(mlp=Leaves), False),
        (lambda: Opens(mlp=Returns), False),
        (lambda: Lists(mlp=WritesToOption), False),
        (Checkpointed, False),
    ],
)
def test_parts_that_cannot_be_excepted(make, separable, recwarn):
    """They are told from their first call, and the steps that measure leave them alone."""
    _, peaks, _ = train("keep", 1, make)
    _, _, store = train(Auto(int(0.7 * max(peaks))), 25, make)
    record = store._controller.gauge.separability
    assert record.seen == {f"blocks.{i}.{part}" for i in range(4) for part in ("norm", "attn", "mlp")} | {
        f"blocks.{i}" for i in range(4)
    }
    assert all(f"blocks.{i}.attn" in record for i in range(4))
    assert all((f"blocks.{i}.mlp" in record) == separable for i in range(4))
    decisions = {d for of_kind in store.plan.profile.figures.values() for d in of_kind}
    assert "attn : keep; recompute" in decisions
    assert ("mlp : keep; recompute" in decisions) == separable


def figures_of(decision, held, work):
    return UnitFigures(decision, 10.0, 20.0, {"": UnitBytes(100, held)}, work_backward=work)


def test_exceptions_are_few_and_those_that_gain():
    record = Separability()
    parts = {name: UnitBytes(saved, saved) for name, saved in zip("abcd", (10, 40, 30, 20), strict=True)}
    record.seen.update(f"unit.{name}" for name in parts)
    record.bound.add("unit.b")
    record.results["unit"] = {"": 1, "matmul": 1, "sdpa": 1, "conv": 1}
    known = {"keep": figures_of("keep", 100, 0.0)}
    known["derive"] = replace(known["keep"], parts={"c": UnitBytes(30, 30), "d": UnitBytes(20, 10)})

    def found(figures, tiers=("host", "disk"), lossy=True):
        return list(record.exceptions("unit", parts, figures, tiers, lossy=lossy))

    assert found(known) == []
    known["recompute"] = figures_of("recompute", 0, 10.0)
    first = [f"{what} : keep; recompute" for what in ("@matmul", "@sdpa", "@conv", "c", "d")]
    assert found(known) == first
    gains = {"@matmul": (50, 4.0), "@sdpa": (50, 8.0), "@conv": (0, 10.0), "c": (20, 8.0), "d": (20, 9.0)}
    known |= {d: figures_of(d, *gains[excepted_part(d)]) for d in first}
    tiers = ("raw @ host", "raw @ disk")
    expected = {
        "@matmul": ("keep", *tiers), "@sdpa": tiers, "c": ("keep", *tiers, "int8"), "d": ("derive", *tiers, "int8"),
    }  # fmt: skip
    second = [except_from_recompute(what, wait) for what, waits in expected.items() for wait in waits]
    assert found(known) == second
    pairs = ("@matmul", "keep"), ("c", "keep"), ("d", "derive")
    assert found(known, (), lossy=False) == [except_from_recompute(*pair) for pair in pairs]
    waits = ("keep", "derive", *tiers, "int8")
    known |= {except_from_recompute(what, wait): figures_of("", 1, 1.0) for what in gains for wait in waits}
    known["derive"] = replace(known["keep"], parts=dict.fromkeys(parts, UnitBytes(20, 0)))
    assert len(found(known)) == 19  # the most there can be


class Interrupt(Exception):
    pass


def test_measuring_that_is_interrupted_leaves_nothing():
    """A forward fails in each step that measures, at another module each time; the step then runs again."""
    torch.manual_seed(0)
    model = Net()
    before = [(name, {*vars(module)}) for name, module in model.named_modules()]
    fails, calls = count(), []

    def failing(_module, _args, _output):
        calls.append(1)
        if torch._C._current_graph_task_id() == -1 and len(calls) == limit:
            raise Interrupt

    hooks = [module.register_forward_hook(failing) for module in model.modules() if not [*module.children()]]
    peak = int(0.6 * max(train("keep", 1)[1]))
    store = ActivationStore(model, Auto(peak), min_bytes=0)
    for _ in range(40):
        limit, calls[:] = 1 + next(fails) % len(hooks), []
        with pytest.raises(Interrupt):
            step(model, store)
        assert store.report().live_bytes == 0
        limit = -1
        step(model, store)
        if store.plan is not None:
            break
    assert store.plan is not None
    decisions = {d for of_kind in store.plan.profile.figures.values() for d in of_kind}
    assert "@matmul : keep; recompute" in decisions
    store.close()
    for hook in hooks:
        hook.remove()
    assert [(name, {*vars(module)}) for name, module in model.named_modules()] == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
