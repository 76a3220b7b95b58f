"""Chains of recomputed calls: inputs that are replayed instead of stored, how often forward runs, what is held."""

import threading
from weakref import ref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from actstore import ActivationStore
from actstore.errors import MutationError
from actstore.plan.solver.revolve import advances, fewest_slots
from tests.autograd.checks import check_drained, check_same, gc_off, train_step

WIDTH = 16
SEGMENTS = ["segment=1", "segment=3", "segment=4", "segment=12"]
SCHEDULES = ["schedule=sqrt", "schedule=revolve, slots=1", "schedule=revolve, slots=3", "schedule=auto"]
STORED = ["raw @ disk, segment=4", "raw, schedule=revolve, slots=2"]
ALL = [*SEGMENTS, *SCHEDULES, *STORED]


class Counted(nn.Module):
    """Counts its calls, for all of its class."""

    runs = 0

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x):
        Counted.runs += 1
        return x + self.drop(self.down(torch.tanh(self.up(x))))


def blocks(count=12, kind=Counted):
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(count)))


class Cell(nn.Module):
    """A recurrent model: one cell, called for each step."""

    def __init__(self, width=4, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = CountedCell(width, width), nn.Linear(width, 2)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        h = c = torch.zeros(x.shape[1], x.shape[2])
        for step in x:
            h, c = self.cell(step, (h, c))
        return self.head(h) + self.drop(c).sum()


class CountedCell(nn.LSTMCell):
    runs = 0

    def forward(self, x, state):
        CountedCell.runs += 1
        return super().forward(x, state)


def make(model, options, where="*", **more):
    return ActivationStore(model, f"{where} : recompute({options})", min_bytes=0, **more)


def runs_of(kind, model, batch, store):
    """The step, and how often forwards ran in it."""
    kind.runs = 0
    step = train_step(model, batch, store)
    return step, kind.runs


def check_exact(model, batch, store, steps=2, **how):
    """Each step is that of plain training, bit for bit, and frees what it held."""
    with gc_off():
        for seed in range(steps):
            check_same(train_step(model, batch, store, seed=seed, **how), train_step(model, batch, seed=seed, **how))
            check_drained(store)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """What a first step imports is no garbage of a test."""
    train_step(blocks(2), (torch.randn(2, WIDTH),), make(blocks(2), "segment=2"))


# -- how often forward runs, and what is held -------------------------------------------------------------------------


@pytest.mark.parametrize(("segment", "replays"), [(1, 0), (2, 5), (3, 7), (4, 8), (5, 8), (12, 10), (100, 10)])
def test_a_segment_replays_each_call_once(segment, replays):
    model, batch = blocks(), (torch.randn(3, WIDTH),)
    _, runs = runs_of(Counted, model, batch, make(model, f"segment={segment}"))
    assert runs == 2 * 12 + replays


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 10, 11, 40])
@pytest.mark.parametrize("length", [1, 2, 3, 10, 32, 50])
def test_revolve_runs_forward_as_often_as_its_formula_says(length, slots):
    """The first sweep is forward itself, whose last call's input is still there: t - (l - 1) replays."""
    model, x = Cell(), torch.randn(length, 2, 4)
    store = make(model, f"schedule=revolve, slots={slots}", "cell")
    train_step(model, (x,), store)  # learns the length
    held = store.report().held_bytes
    _, runs = runs_of(CountedCell, model, (x,), store)
    assert runs == 2 * length + advances(length, slots) - (length - 1)
    assert store.report().held_bytes <= held or length > slots


@pytest.mark.slow
@pytest.mark.parametrize(("length", "slots", "sweeps"), [(16, 4, 27), (100, 10, 222), (1000, 10, 3636)])
def test_revolve_over_many_steps(length, slots, sweeps):
    model, x = Cell(), torch.randn(length, 2, 4)
    store = make(model, f"schedule=revolve, slots={slots}", "cell")
    train_step(model, (x,), store)
    step, runs = runs_of(CountedCell, model, (x,), store)
    assert runs == length + 1 + sweeps
    check_same(step, train_step(model, (x,)))


def test_revolve_over_blocks_knows_their_number_in_the_first_step():
    model, batch = blocks(), (torch.randn(3, WIDTH),)
    _, runs = runs_of(Counted, model, batch, make(model, "schedule=revolve, slots=3"))
    assert runs == 2 * 12 + advances(12, 3) - 11


@pytest.mark.parametrize("length", [7, 50, 200])
def test_auto_takes_the_fewest_slots_below_two_replays_for_each_call(length):
    model, x = Cell(), torch.randn(length, 2, 4)
    store = make(model, "schedule=auto", "cell")
    first = runs_of(CountedCell, model, (x,), store)[1]
    second = runs_of(CountedCell, model, (x,), store)[1]
    assert second == 2 * length + advances(length, fewest_slots(length)) - (length - 1)
    assert 2 * length <= second <= first < 6 * length
    assert second < 4 * length


@pytest.mark.parametrize(
    ("options", "states"),
    [("schedule=revolve, slots=5", 5), ("schedule=auto", 9), ("schedule=sqrt", 2 * 15), ("segment=10", 20 + 10)],
)
def test_the_peak_grows_as_the_slots_and_not_as_the_steps(options, states):
    """Also in the first step, where the number of steps is not known."""
    model, x = Cell(), torch.randn(200, 2, 4)
    plain, store, one = (make(model, how, "cell") for how in ("segment=1", options, "segment=1"))
    train_step(model, (x[:1].clone(),), one)
    state, outside = 2 * 4 * 2 * 4, x.nbytes  # h and c; x is stored as one
    loss = one.report().peak_held_bytes  # one cell's activations, the head and the loss
    peaks = []
    for _ in range(2):
        train_step(model, (x,), store)
        peaks.append(store.report().peak_held_bytes)
    train_step(model, (x,), plain)
    assert plain.report().peak_held_bytes > 200 * state + outside
    assert peaks[0] < (1.5 * states + 2) * state + outside + loss
    assert peaks[1] < (states + 2) * state + outside + loss


def test_a_chain_of_another_length_is_exact_and_does_not_run_away():
    model = Cell()
    store = make(model, "schedule=revolve, slots=4", "cell")
    for length in (5, 60, 8, 1, 61):
        x = torch.randn(length, 2, 4)
        step, runs = runs_of(CountedCell, model, (x,), store)
        check_same(step, train_step(model, (x,)))
        assert runs < 12 * length
    check_drained(store)


def test_only_the_first_calls():
    model, x = Cell(), torch.randn(20, 2, 4)
    store = make(model, "first=15", "cell")
    for _ in range(2):
        step, runs = runs_of(CountedCell, model, (x,), store)
        assert runs == 20 + 15
        check_same(step, train_step(model, (x,)))
    store = make(model, "schedule=revolve, slots=3, first=15", "cell")
    for _ in range(2):
        step, runs = runs_of(CountedCell, model, (x,), store)
        check_same(step, train_step(model, (x,)))
    assert runs == 20 + 15 + advances(15, 3) - 14


# -- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ALL)
def test_blocks_with_dropout(options):
    model = blocks()
    check_exact(model, (torch.randn(3, WIDTH),), make(model, options))


@pytest.mark.parametrize("options", ALL)
def test_a_cell_in_a_loop(options):
    model = Cell(dropout=0.5)
    check_exact(model, (torch.randn(25, 3, 4),), make(model, options, "cell"))


@pytest.mark.parametrize("options", ["segment=3", "schedule=revolve, slots=2"])
@pytest.mark.parametrize("how", [{"autocast": True}, {"inside": True}], ids=["autocast", "inside"])
def test_autocast_and_backward_inside_of_the_context(options, how):
    model = blocks()
    check_exact(model, (torch.randn(3, WIDTH),), make(model, options), **how)


def test_each_call_is_replayed_under_its_own_autocast():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks(9)

        def forward(self, x):
            for i, block in enumerate(self.blocks):
                with torch.autocast("cpu", torch.bfloat16, enabled=i % 3 == 1):
                    x = block(x)
            return x

    model = Mixed()
    check_exact(model, (torch.randn(3, WIDTH),), make(model, "segment=9", "blocks.*"))


class Keywords(nn.Module):
    """Takes and gives nested containers and keyword arguments."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, state, *, mask=None, extra=()):
        y = torch.tanh(self.inner(state["x"])) * (1 if mask is None else mask)
        for part, power in extra:
            y = y + part**power
        return {"x": y, "rest": [y.cos() + state["rest"][0], None, "text"]}


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Keywords() for _ in range(7))

    def forward(self, x, mask):
        state = {"x": x.sin(), "rest": [x.cos(), None, "text"]}
        for i, block in enumerate(self.blocks):
            state = block(state, mask=mask.exp(), extra=[(x, 1 + i % 2)])
        return state["x"] + state["rest"][0]


@pytest.mark.parametrize("options", ALL)
def test_keyword_arguments_and_containers(options):
    torch.manual_seed(0)
    model, batch = Nested(), (torch.randn(3, WIDTH), torch.rand(3, WIDTH))
    check_exact(model, batch, make(model, options, "blocks.*"))


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.inner(x)))


@pytest.mark.parametrize("options", ["segment=4", "schedule=revolve, slots=1"])
def test_running_statistics_are_updated_once(options):
    model, plain, batch = blocks(8, Norms), blocks(8, Norms), (torch.randn(6, WIDTH),)
    store = make(model, options)
    for seed in range(2):
        check_same(train_step(model, batch, store, seed=seed), train_step(plain, batch, seed=seed))
        check_same(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_weights_of_a_functional_call():
    model, x = blocks(6), torch.randn(3, WIDTH)
    weights = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}

    def run(store):
        torch.manual_seed(1)
        if store is None:
            loss = functional_call(model, weights, (x,)).sum()
        else:
            with store:
                loss = functional_call(model, weights, (x,)).sum()
        return torch.autograd.grad(loss, list(weights.values()))

    check_same(run(make(model, "segment=3")), run(None))


class ByMode(nn.Module):
    """Computes something else where no gradients are wanted, as kernels and some modules of torch do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.tanh(self.inner(x))
        return y if torch.is_grad_enabled() and x.requires_grad else y * 2


def test_a_replay_sees_gradients_enabled():
    model, x = blocks(6, ByMode), torch.randn(3, WIDTH, requires_grad=True)
    check_exact(model, (x,), make(model, "segment=3"))


class Differentiates(nn.Module):
    """Its output is a gradient of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.autograd.grad(torch.tanh(self.inner(x)).square().sum(), x, create_graph=True)[0]


def test_a_block_that_differentiates():
    model, x = blocks(5, Differentiates), torch.randn(3, WIDTH, requires_grad=True)
    check_exact(model, (x,), make(model, "segment=2"), steps=1)


@pytest.mark.parametrize("options", ALL)
def test_several_backwards_of_one_graph(options):
    model, x = blocks(7), torch.randn(3, WIDTH, requires_grad=True)
    store, leaves = make(model, options), [x, *model.parameters()]

    def run(store):
        torch.manual_seed(1)
        if store is None:
            y = model(x)
        else:
            with store:
                y = model(x)
        first = torch.autograd.grad(y[0].sum(), leaves, retain_graph=True)
        part = torch.autograd.grad(y.sum(), list(model[5].parameters()), retain_graph=True)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return [*first, *part, *torch.autograd.grad(slope.square().sum(), leaves)]

    with gc_off():
        check_same(run(store), run(None))
        check_drained(store)


@pytest.mark.parametrize("options", ["segment=4", "schedule=revolve, slots=3"])
def test_a_retained_graph_holds_no_more_than_before(options):
    model, x = blocks(), torch.randn(3, WIDTH)
    store = make(model, options)
    with store:
        y = model(x)
    held = store.report().live_bytes
    for _ in range(2):
        y.sum().backward(retain_graph=True)
        assert store.report().live_bytes == held


def test_the_peak_includes_what_a_replay_computes():
    """Also of a call that is replayed and not itself recomputed."""
    model, x = blocks(3), torch.randn(50, WIDTH)
    model[0].up, model[0].down = nn.Linear(WIDTH, 1000), nn.Linear(1000, WIDTH)
    store = make(model, "segment=3")
    with store:
        y = model(x)
    torch.autograd.grad(y.sum(), list(model[1].parameters()))
    assert store.report().peak_held_bytes > 50 * 1000 * 4


# -- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ALL)
def test_a_graph_without_backward_leaves_nothing(options):
    model, store = blocks(), None
    store = make(model, options)
    with gc_off():
        with store:
            y = model(torch.randn(3, WIDTH))
        del y
        check_drained(store)
        with store:
            y = model(torch.randn(3, WIDTH))
        torch.autograd.grad(y.sum(), list(model[9].parameters()))
        del y
        check_drained(store)


@pytest.mark.parametrize("options", ["segment=3", "schedule=revolve, slots=2"])
def test_interleaved_graphs_and_entries(options):
    model, leaves = blocks(6), None
    leaves = list(model.parameters())
    store, xs = make(model, options), torch.randn(3, 3, WIDTH)

    def run(enter):
        torch.manual_seed(1)
        with enter():
            a = model(xs[0])
            b = model(xs[1])
            with enter():
                c = model(xs[2])
        grads = []
        for order in ((b, a), (c,)):
            grads += torch.autograd.grad(sum(y.sum() for y in order), leaves)
        return grads

    with gc_off():
        check_same(run(lambda: store), run(torch.enable_grad))
        check_drained(store)


@pytest.mark.parametrize("options", ["segment=3", "schedule=revolve, slots=2"])
def test_threads(options):
    """Each with a forward of its own, then all with one backward of the same graph."""
    models = [blocks(6, Norms) for _ in range(3)]
    x = torch.randn(3, WIDTH)
    wanted = train_step(models[0], (x,))
    found, stores = {}, [make(model, options) for model in models]

    def run(number):
        found[number] = train_step(models[number], (x,), stores[number])

    def together(runs):
        threads = [threading.Thread(target=one) for one in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    together([lambda number=number: run(number) for number in range(3)])
    for step in found.values():
        check_same(step, wanted)
    leaves, grads = list(models[0].parameters()), []
    with stores[0]:
        y = models[0](x).square().mean()
    together([lambda: grads.append(torch.autograd.grad(y, leaves, retain_graph=True))] * 3)
    for one in grads:
        check_same(one, list(wanted.grads.values()))
    assert len(grads) == 3


class Layers(nn.Module):
    """Two recurrent layers, each call recomputed by itself: the calls of one feed both."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(CountedCell(4, 4) for _ in range(2))

    def forward(self, x):
        states = [(torch.zeros(x.shape[1:]),) * 2 for _ in self.cells]
        for step in x:
            for i, cell in enumerate(self.cells):
                states[i] = cell(step, states[i])
                step = states[i][0]
        return sum(h + c for h, c in states)


class Crossed(nn.Module):
    """An encoder whose last output all blocks of the decoder see."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Counted() for _ in range(5))
        self.decoder = nn.ModuleList(Sees() for _ in range(5))

    def forward(self, x, y):
        for block in self.encoder:
            x = block(x)
        for block in self.decoder:
            y = block(y, x)
        return y


class Sees(Counted):
    def forward(self, y, seen):
        return super().forward(y * seen.sigmoid())


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize(
    ("kind", "where", "shapes"), [(Layers, "cells.*", [(9, 3, 4)]), (Crossed, "*coder.*", [(3, WIDTH)] * 2)]
)
def test_calls_with_several_producers_and_takers(kind, where, shapes, options):
    torch.manual_seed(0)
    model, batch = kind(), tuple(torch.randn(*shape) for shape in shapes)
    check_exact(model, batch, make(model, options, where))


class Ended(Crossed):
    """Its last block does not see the encoder, whose output is therefore gone when backward begins."""

    def __init__(self):
        super().__init__()
        self.recoder = nn.ModuleList([Counted()])

    def forward(self, x, y):
        return self.recoder[0](super().forward(x, y))


def test_what_several_calls_take_is_replayed_once():
    torch.manual_seed(0)
    model, batch = Ended(), (torch.randn(3, WIDTH), torch.randn(3, WIDTH))
    _, runs = runs_of(Counted, model, batch, make(model, "segment=100", "*coder.*"))
    assert runs == 2 * 11 + 4 + 5  # of the decoder, and of the encoder


def test_stacked_cells_hold_as_little():
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(100, 3, 4)
    plain, store = make(model, "segment=1", "cells.*"), make(model, "schedule=revolve, slots=6", "cells.*")
    for one in (plain, store, store):
        runs = runs_of(CountedCell, model, (x,), one)[1]
    assert runs < 2 * 200 + 4 * 200
    assert store.report().peak_held_bytes - x.nbytes < 0.25 * (plain.report().peak_held_bytes - x.nbytes)


@pytest.mark.parametrize("first", ["graph", pytest.param("nodes", marks=pytest.mark.slow)])
def test_ten_thousand_calls_are_freed_without_recursion(first):
    """All at once, or the nodes of all calls but the last before what that one leads to."""

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.weight

    model, x = nn.Sequential(Adds()), torch.ones(2)
    store = make(model, "schedule=revolve, slots=50")
    with gc_off():
        with store:
            for _ in range(10_000):
                x = model(x)
        if first == "nodes":
            (grad,) = torch.autograd.grad(x.sum(), model[0].weight)
            assert grad.tolist() == [10_000.0] * 2
        del x
        check_drained(store)


# -- what breaks a chain ----------------------------------------------------------------------------------------------


class Between(nn.Module):
    """Does something with what goes from block to block."""

    def __init__(self, what):
        super().__init__()
        self.blocks, self.what = blocks(6), what

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = self.what(i, block(x))
        return x


BETWEEN = {
    "operation": lambda _, x: x * 1,
    "in_place": lambda _, x: x.mul_(2),
    "in_place_once": lambda i, x: x.add_(1) if i == 2 else x,
    "data": lambda _, x: x.data.requires_grad_(),
    "view": lambda _, x: x.view_as(x),
    "other_view": lambda _, x: x.t().t(),
    "flipped": lambda _, x: x.flip(0)[:],
}


@pytest.mark.parametrize("what", BETWEEN)
@pytest.mark.parametrize("options", ["segment=3", "schedule=revolve, slots=2"])
def test_what_happens_between_blocks(options, what):
    model = Between(BETWEEN[what])
    check_exact(model, (torch.randn(3, WIDTH),), make(model, options, "blocks.*"))


def test_a_chain_that_never_begins_is_said():
    model, batch = Between(BETWEEN["operation"]), (torch.randn(3, WIDTH),)
    store = make(model, "segment=3", "blocks.*")
    _, runs = runs_of(Counted, model, batch, store)
    assert runs == 12
    notes = {site.site: site.note for site in store.report().sites}
    assert "no recomputed call returned its inputs" in notes["blocks.3[0]"]


@pytest.mark.parametrize("decision", ["segment=3", "raw, segment=3"])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_write_after_a_block_has_taken_it_is_an_error(number, decision):
    """Whether it is live, replayed or stored."""
    model, x = blocks(6), torch.randn(3, WIDTH)
    outputs = []
    for block in model:
        block.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    store = make(model, decision)
    with store:
        y = model(x)
    with torch.no_grad():
        outputs[number - 1].add_(1)
    with pytest.raises(MutationError, match="modified by an inplace operation"):
        y.sum().backward()
    outputs.clear()
    if decision.startswith("raw"):
        torch.manual_seed(1)
        store = make(model, decision, allow_mutation=True)
        with store:
            y = model(x)
        with torch.no_grad():
            outputs[number - 1].add_(1)
        leaves = list(model.parameters())
        found = torch.autograd.grad(y.sum(), leaves)
        torch.manual_seed(1)
        check_same(found, torch.autograd.grad(model(x).sum(), leaves))


def test_blocks_skipped_and_in_another_order():
    class Any(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.order = blocks(8), range(8)

        def forward(self, x):
            for i in self.order:
                x = self.blocks[i](x)
            return x

    model, batch = Any(), (torch.randn(3, WIDTH),)
    store = make(model, "schedule=revolve, slots=3", "blocks.*")
    for order in (range(8), (0, 2, 3, 7), (7, 6, 5, 4, 3, 2, 1, 0), (0, 1, 1, 1, 2, 0, 5, 5, 5, 6, 7, 3)):
        model.order = order
        check_exact(model, batch, store, steps=1)


class Fails(Counted):
    """Fails in its second run."""

    failing = None

    def forward(self, x):
        if Fails.failing is self and Counted.runs >= 12:
            raise ZeroDivisionError("mine")
        return super().forward(x)


def test_a_replay_that_fails_names_the_module_and_holds_nothing():
    model, x = blocks(12, Fails), torch.randn(3, WIDTH)
    store = make(model, "segment=6")
    Counted.runs, Fails.failing = 0, model[8]
    with gc_off():
        with store:
            y = model(x)
        held = store.report().live_bytes
        with pytest.raises(ZeroDivisionError, match="mine") as info:
            y.sum().backward()
        assert info.value.__notes__ == [
            "while replaying 8 (recompute(segment=6)) for its output",
            "while recomputing 10 (recompute(segment=6))",
        ]
        del info
        assert store.report().live_bytes <= held
        del y
        check_drained(store)
    Fails.failing = None
    check_exact(model, (x,), store)


# -- stores and checkpoints -------------------------------------------------------------------------------------------


def test_stores_in_stores():
    model, x = blocks(6), torch.randn(3, WIDTH)
    outer, inner = make(model, "segment=2"), make(model, "raw, segment=3")
    torch.manual_seed(1)
    with outer:
        h = model[:3](x)
        with inner:
            y = model[3:](h)
    leaves = list(model.parameters())
    found = torch.autograd.grad(y.sum(), leaves)
    torch.manual_seed(1)
    check_same(found, torch.autograd.grad(model(x).sum(), leaves))
    del y, h
    check_drained(outer)
    check_drained(inner)


class Checkpoints(Counted):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("options", ["segment=3", "schedule=revolve, slots=2"])
@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
def test_a_checkpoint_of_the_users_inside_a_block(options):
    model = blocks(6, Checkpoints)
    check_exact(model, (torch.randn(3, WIDTH),), make(model, options))


@pytest.mark.parametrize("options", ["segment=1", "segment=3", "schedule=revolve, slots=2"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.filterwarnings("ignore:.*Switch the model's own checkpoints off:RuntimeWarning")
def test_a_checkpoint_of_the_users_around_blocks(options, inside):
    """It runs them again as a whole, where there may be no store."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks(6)

        def forward(self, x):
            return self.blocks[4:](checkpoint(self.blocks[:4], x, use_reentrant=False))

    model = Around()
    check_exact(model, (torch.randn(3, WIDTH),), make(model, options, "blocks.*"), inside=inside)


def test_a_lossy_store():
    model, x = blocks(8), torch.randn(64, WIDTH)
    store = make(model, "int8, segment=4")
    step = train_step(model, (x,), store)
    assert store.report().stored_bytes < 3 * x.nbytes
    plain = train_step(model, (x,))
    errors = [(step.grads[n] - plain.grads[n]).norm() / plain.grads[n].norm() for n in plain.grads]
    assert 0 < max(errors) < 0.05


def test_a_store_with_recomputed_modules_is_freed_with_its_last_reference():
    model = blocks()
    store = make(model, "segment=3")
    train_step(model, (torch.randn(3, WIDTH),), store)
    weak = ref(store)
    with gc_off():
        del store
        assert weak() is None
