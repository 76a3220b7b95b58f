"""What the profiler measures, on a clock that only the modules themselves move."""

import gc

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.auto.profiler import Profiler
from actstore.base.ledger import Ledger
from actstore.base.spec import Site
from actstore.base.ticket import Done
from actstore.devices import Cpu
from actstore.model.units import digest_of, shapes_of
from actstore.policy import parse_decision

MS = 1_000_000


class Clock(Cpu):
    """A CPU whose time passes when somebody says so."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.now = 0

    def mark(self, stream):
        return Done((self.now, self.now))


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, ms):
        ctx.clock, ctx.ms = clock, ms
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.now += ctx.ms * MS
        return grad, None, None


class Slow(nn.Module):
    """Takes `forward_ms` and `backward_ms`, and has a parameter."""

    def __init__(self, clock, forward_ms, backward_ms):
        super().__init__()
        self.clock, self.forward_ms, self.backward_ms = clock, forward_ms, backward_ms
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.clock.now += self.forward_ms * MS
        return _Pass.apply(x * self.weight, self.clock, self.backward_ms)


class Pair(nn.Module):
    """A residual block of two parts."""

    def __init__(self, clock, scale):
        super().__init__()
        self.a, self.b = Slow(clock, 1 * scale, 2 * scale), Slow(clock, 3 * scale, 5 * scale)

    def forward(self, x):
        x = x + self.a(x)
        return x + self.b(x)


class Net(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.stem = Slow(clock, 7, 11)
        self.blocks = nn.ModuleList([Pair(clock, 1), Pair(clock, 10)])
        self.head = Slow(clock, 13, 17)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def measure(model, step, decisions=None):
    profiler = Profiler(model, Ledger())
    clock = next(module.clock for module in model.modules() if isinstance(module, Slow))
    profiler.begin(clock, decisions or {})
    loss = step()
    profiler.end_forward()
    clock.now += 100 * MS  # the loss, say
    loss.backward()
    clock.now += 1000 * MS  # the optimizer
    return profiler.finish()


def test_times_are_those_of_the_modules():
    model = Net(Clock())
    sample = measure(model, lambda: model(torch.ones(3)))
    times = {name: (f.forward, f.backward) for name, [f] in sample.figures.items()}
    assert times == {
        "stem": (7, 11),
        "blocks.0": (4, 7),
        "blocks.1": (40, 70),
        "head": (13, 17),
        "": (0, 0),
    }
    assert sample.backward
    assert sample.total == 7 + 4 + 40 + 13 + 100 + 105 + 1000
    assert sample.rest == 1100
    assert set(sample.calls.values()) == {1}


def test_the_step_is_left_as_it_was():
    """Hooks are gone after forward, and what is measured has plain gradients."""
    model = Net(Clock())
    model(torch.ones(3)).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    measure(model, lambda: model(torch.ones(3)))
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class _Collecting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        gc.collect()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        gc.collect()
        return grad


class Littering(Slow):
    """Garbage is collected in its third call, and in the backward of that."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        x = super().forward(x)
        return _Collecting.apply(x) if self.calls == 3 else x


def test_a_full_collection_of_garbage_is_no_time_of_the_call_that_ran():
    clock = Clock()
    model = nn.ModuleDict({"a": Slow(clock, 2, 3), "b": Littering(clock, 5, 7)})

    def step():
        x = model["a"](torch.ones(3))
        for _ in range(4):
            x = model["b"](x)
        return x.sum()

    def collecting(phase, info):
        clock.now += 500 * MS  # at the start and at the stop

    gc.disable()
    gc.callbacks.append(collecting)
    try:
        sample = measure(model, step)
    finally:
        gc.callbacks.remove(collecting)
        gc.enable()
    times = {name: (f.forward, f.backward) for name, [f] in sample.figures.items()}
    assert times == {"a": (2, 3), "b": (20, 28), "": (0, 0)}
    assert sample.total == 53 + 100 + 1000 + 2000
    assert sample.rest == 3100


def test_calls_of_one_module_add_up():
    clock = Clock()
    model = nn.ModuleDict({"cell": Slow(clock, 2, 3)})

    def step():
        x = torch.ones(3)
        for _ in range(5):
            x = model["cell"](x)
        return x.sum()

    sample = measure(model, step)
    [whole] = sample.figures["cell"]
    assert (whole.forward, whole.backward, sample.calls["cell"]) == (10, 15, 5)


def one_forward_one_backward(model, waiting, count):
    """Run micro-batches as a stage of a pipeline: `waiting` forwards, then a backward after each forward."""
    losses = []
    for number in range(count):
        losses.append(model(torch.ones(3) * number))
        if number >= waiting - 1:
            losses.pop(0).backward()
    for loss in losses:
        loss.backward()


@pytest.mark.parametrize("waiting", [1, 3, 5])
def test_calls_of_micro_batches_wait_for_backwards_of_their_own(waiting):
    model = Net(Clock())
    store = ActivationStore(model, "keep", min_bytes=0)
    profiler = Profiler(model, store._store.ledger)
    with store:
        profiler.begin(model.head.clock, {})
        one_forward_one_backward(model, waiting, 5)
        profiler.end_forward()
    sample = profiler.finish()
    assert {max(turns) for turns in sample.turns.values()} == {waiting}
    assert set(sample.turns) == set(sample.figures)
    assert set(sample.calls.values()) == {5}
    for [figures] in sample.figures.values():
        assert figures.total("held") * 5 == figures.total("saved") * waiting


def test_more_may_wait_after_the_first_turn():
    """As in a schedule without bubbles, where the gradients of weights come later."""
    model = Net(Clock())
    store = ActivationStore(model, "keep", min_bytes=0)
    profiler = Profiler(model, store._store.ledger)
    with store:
        profiler.begin(model.head.clock, {})
        first = model(torch.ones(3))
        first.backward(retain_graph=True)
        other = model(torch.ones(3))
        other.backward()
        del first
        profiler.end_forward()
    sample = profiler.finish()
    assert {max(sample.turns[name]) for name in ("stem", "blocks.0", "blocks.1", "head")} == {2}


def test_stages_of_one_rank_hold_most_at_turns_of_their_own():
    """As in an interleaved schedule: the first stage runs ahead, and holds most when the second one is empty."""
    model = Net(Clock())
    store = ActivationStore(model, "keep", min_bytes=0)
    profiler = Profiler(model, store._store.ledger)
    first, second = model.blocks[0], model.blocks[1]
    with store:
        profiler.begin(model.head.clock, {})
        early = [first(torch.ones(3)).sum() for _ in range(2)]
        late = [second(torch.ones(3)).sum() for _ in range(3)]
        late.pop().backward()  # 2 and 3 wait
        early.append(first(torch.ones(3)).sum())
        late.pop().backward()  # 3 and 2
        late.pop().backward()
        early.append(first(torch.ones(3)).sum())
        early.pop().backward()  # 4 and 0
        del early
        profiler.end_forward()
    sample = profiler.finish()
    found = list(zip(sample.turns["blocks.0"], sample.turns["blocks.1"], strict=True))
    assert list(dict.fromkeys(found)) == [(2, 3), (3, 2), (3, 1), (4, 0), (0, 0)]
    for name, waiting, calls in (("blocks.0", 4, 4), ("blocks.1", 3, 3)):
        [figures] = sample.figures[name]
        assert figures.total("held") * calls == figures.total("saved") * waiting


def test_calls_before_one_backward_wait_together():
    clock = Clock()
    model = nn.ModuleDict({"cell": Slow(clock, 2, 3)})
    assert measure(model, lambda: model["cell"](model["cell"](torch.ones(3))).sum()).turns == {}
    net = Net(clock)
    assert measure(net, lambda: net(torch.ones(3))).turns == {}


def test_calls_that_are_decided_differently_are_told_apart():
    clock = Clock()
    model = nn.ModuleDict({"cell": Slow(clock, 2, 3)})
    store = ActivationStore(model, "cell : recompute(first=2)", min_bytes=0)
    profiler = Profiler(model, store._store.ledger)

    def forward():
        x = torch.ones(3)
        for _ in range(5):
            x = model["cell"](x)
        return x.sum()

    with store:
        profiler.begin(clock, {"cell": "recompute(first=2)"})
        loss = forward()
        profiler.end_forward()
    loss.backward()
    halves = {f.decision: f for f in profiler.finish().figures["cell"]}
    assert halves["recompute"].forward == halves["keep"].forward == 10
    assert halves["keep"].backward == 15
    assert halves["recompute"].backward == 25  # each call runs forward once more


def test_an_evaluation_has_no_backward():
    model = Net(Clock())
    profiler = Profiler(model, Ledger())
    profiler.begin(model.head.clock, {})
    with torch.no_grad():
        model(torch.ones(3))
    profiler.end_forward()
    assert not profiler.finish().backward


def test_a_step_that_ran_nothing_has_no_figures():
    model = Net(Clock())
    profiler = Profiler(model, Ledger())
    assert profiler.finish() is None
    profiler.begin(model.head.clock, {})
    assert profiler.finish() is None
    profiler.begin(model.head.clock, {})
    model(torch.ones(3))
    profiler.cancel()
    assert profiler.finish() is None


def test_units_of_a_model():
    shapes = {shape.name: shape for shape in shapes_of(Net(Clock()))}
    assert list(shapes) == ["stem", "blocks.0", "blocks.1", "head", ""]
    assert list(shapes["blocks.0"].parts) == ["a", "b"]
    assert [name for name, shape in shapes.items() if shape.recomputable] == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "head", nn.Linear(2, 2)),
        lambda model: model.blocks.append(Pair(Clock(), 1)),
        lambda model: model.double(),
    ],
)
def test_the_digest_sees_another_model(change):
    model = Net(Clock())
    before = digest_of(model)
    assert before == digest_of(Net(Clock()))
    change(model)
    assert digest_of(model) != before


@pytest.mark.parametrize(
    ("text", "host", "disk"), [("raw @ host > disk", 100, 0), ("raw @ disk", 0, 100), ("raw", 0, 0)]
)
def test_stored_bytes_count_in_one_place(text, host, disk):
    """Not in each tier of a ladder, and not because a tier's name stands in the text."""
    ledger, model = Ledger(), nn.Sequential(nn.Linear(2, 2))
    account = ledger.account(Site("0", 0))
    account.decision, account.saved, account.stored, account.held_at_exit = parse_decision(text), 100, 100, 100
    parts, _ = Profiler(model, ledger)._bytes({})
    [found] = [nbytes for unit in parts.values() for nbytes in unit.values()]
    assert (found.host, found.disk, found.held) == (host, disk, 0 if host or disk else 100)
