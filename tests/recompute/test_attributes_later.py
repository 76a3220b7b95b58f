"""Attributes that other code changes between forward and backward: a recomputed module reads what forward read."""

import gc
from functools import partial

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.errors import StateError
from tests.autograd.checks import check_drained, check_same, gc_off
from tests.autograd.models import WIDTH


class Scaled(nn.Module):
    """Reads attributes that forward does not change."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.scale, self.mask, self.rows, self.function = 2.0, torch.ones(WIDTH), [1.0], torch.tanh
        self.large, self.tables, self.nested = torch.ones(2**19), [torch.ones(2**19)], {"rows": [object()]}
        self.inside, self.many, self.draws = {"rows": [1.0], "of": {"step": 1.0}}, [0.0] * 65, [torch.Generator()]
        self.act, self.limit = nn.LeakyReLU(0.1), partial(torch.clamp, min=-0.5)
        self.register_buffer("step", torch.ones(()))
        self.register_buffer("table", torch.ones(2048))

    def forward(self, x):
        factor = (
            self.scale
            * sum(self.rows)
            * self.large[0]
            * self.tables[0][0]
            / len(self.nested)
            * (3.0 if self.training else 1.0)
        )
        factor = factor * sum(self.inside["rows"]) * self.inside["of"]["step"] * (1 + sum(self.many))
        noise = torch.rand(WIDTH, generator=self.draws[0])
        y = self.act(torch.tanh(self.inner(x) + self.step * getattr(self, "bias", 1.0)))
        return self.drop(self.norm(self.limit(self.function(y)) * self.mask * noise * factor * self.table[0].sin()))


def ends_training(block):
    block.eval()


def sets_a_number(block):
    block.scale = 5.0


def sets_a_tensor(block):
    block.mask = torch.zeros(WIDTH)


def sets_a_function(block):
    block.function = torch.sigmoid


def sets_a_partial_function(block):
    block.limit = partial(torch.clamp, min=0.1)


def appends_a_row(block):
    block.rows.append(7.0)


def sets_a_list(block):
    block.rows = [7.0]


def appends_inside(block):
    block.nested["rows"].append(object())


def appends_a_row_inside(block):
    block.inside["rows"].append(7.0)


def sets_an_entry_inside(block):
    block.inside["of"]["step"] = 7.0


def writes_to_a_small_buffer(block):
    block.step.add_(1)


def sets_what_was_absent(block):
    block.bias = 3.0


def sets_a_rate(block):
    block.drop.p = 0.9


def sets_a_slope(block):
    block.act.negative_slope = 0.9


def deletes_a_number(block):
    del block.scale


def freezes(block):
    block.requires_grad_(False)


def freezes_a_bias(block):
    block.inner.bias.requires_grad_(False)


RECOMPUTE = ["recompute", "recompute(raw @ disk)"]
LATER = [
    ends_training, sets_a_number, sets_a_tensor, sets_a_function, sets_a_partial_function, appends_a_row,
    appends_inside, sets_a_list, deletes_a_number, appends_a_row_inside, sets_an_entry_inside,
    writes_to_a_small_buffer, sets_what_was_absent, sets_a_rate, sets_a_slope, freezes, freezes_a_bias,
]  # fmt: skip


def later(decision, change):
    """The gradients of a step in which other code changes attributes between forward and backward."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Scaled() for _ in range(2))), torch.randn(6, WIDTH)
    store = ActivationStore(model, decision, min_bytes=0)
    with store:
        loss = model(x).square().sum()
    for block in model[1:]:
        change(block)
    were = [{**vars(block), "rows": [*block.rows]} for block in model[1:]]
    needs = [weight.requires_grad for weight in model.parameters()]
    loss.backward()
    assert [weight.requires_grad for weight in model.parameters()] == needs
    for block, was in zip(model[1:], were, strict=True):
        now = vars(block)
        assert now.keys() == was.keys()
        assert now["rows"] == was["rows"]
        assert all(now[name] is was[name] for name in was if name != "rows")
        assert {each.training for each in block.modules()} == {block.training}
    return [weight.grad for weight in model.parameters()]


@pytest.mark.parametrize("change", LATER, ids=lambda change: change.__name__)
@pytest.mark.parametrize("decision", [f"1 : {text}; 2 : {text}; * : keep" for text in RECOMPUTE])
def test_a_second_run_reads_what_forward_read(decision, change):
    check_same(later(decision, change), later("keep", change))


@pytest.mark.parametrize("frozen", [True, False])
def test_weights_require_gradients_as_in_forward(frozen):
    """Two forwards wait, one with the weights trained and one with them frozen, as in adversarial training."""

    def grads(decision):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled()), torch.randn(6, WIDTH)
        losses = []
        for trained in (True, False):
            model[1].requires_grad_(trained)
            with ActivationStore(model, decision, min_bytes=0):
                losses.append(model(x).square().sum())
        model[1].requires_grad_(not frozen)
        for loss in losses:
            loss.backward()
        assert all(weight.requires_grad is not frozen for weight in model[1].parameters())
        return [weight.grad for weight in model.parameters()]

    check_same(grads("1 : recompute; * : keep"), grads("keep"))


def test_what_cannot_wait_is_refused_where_it_was_replaced():
    def large(block):
        block.large = torch.zeros(2**19)

    with pytest.raises(StateError, match=r"attribute=Scaled.large: other code changed it between forward"):
        later("1 : recompute; * : keep", large)

    def large_twice(block):
        """The second object may lie where the first one of all has lain."""
        block.large = None
        block.large = torch.zeros(2**19)

    with pytest.raises(StateError, match=r"attribute=Scaled.large: other code changed it between forward"):
        later("1 : recompute; * : keep", large_twice)

    def list_twice(block):
        block.tables = None
        block.tables = [torch.zeros(2**19)]

    def appends(block):
        block.tables.append(torch.zeros(2**19))

    def fills_a_long_list(block):
        block.many[3] = 1.0

    with pytest.raises(StateError, match=r"attribute=Scaled.many: other code changed it between forward"):
        later("1 : recompute; * : keep", fills_a_long_list)

    def writes_to_a_table(block):
        block.table.add_(1)

    with pytest.raises(StateError, match=r"tensor=table: other code wrote to it in place between forward"):
        later("1 : recompute; * : keep", writes_to_a_table)

    for change in (list_twice, appends):
        with pytest.raises(StateError, match=r"attribute=Scaled.tables: other code changed it between forward"):
            later("1 : recompute; * : keep", change)

    def other_module(block):
        block.inner = nn.Linear(WIDTH, WIDTH)

    with pytest.raises(StateError, match=r"module=Scaled.inner: it was replaced between forward and backward"):
        later("1 : recompute; * : keep", other_module)


class Remembers(nn.Module):
    """Puts what it computes, with its graph, into a list inside of another one."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = nn.Linear(WIDTH, WIDTH), [[]]

    def forward(self, x):
        y = self.inner(x).tanh()
        self.seen[0].append(y)
        return y


def test_a_graph_without_backward_ends_with_its_loss():
    """What a region knows of attributes keeps no graph alive that it is part of: no collector would see it."""
    block = Remembers()
    store = ActivationStore(nn.Sequential(block), "0 : recompute; * : keep", min_bytes=0)
    with gc_off():
        for _ in range(2):
            with store:
                block(torch.randn(6, WIDTH)).sum()
            block.seen = [[]]
        check_drained(store)


def test_a_forward_that_fails_keeps_no_graph():
    class Fails(Remembers):
        def forward(self, x):
            super().forward(x)
            raise ValueError("no forward")

    block = Fails()
    store = ActivationStore(nn.Sequential(block), "0 : recompute; * : keep", min_bytes=0)
    with gc_off():
        with store, pytest.raises(ValueError, match="no forward"):
            block(torch.randn(6, WIDTH))
        with pytest.raises(StateError, match="the forward of the module ended in an error"):
            block.seen[0][0].sum().backward()
        torch.zeros((), requires_grad=True).backward()  # before, PyTorch's queue has nodes of the backward that failed
        block.seen = [[]]
        gc.collect()  # of the frames of the errors
        check_drained(store)


class Fills(nn.Module):
    """Writes to containers that it is given, as blocks do that hand hidden states and losses on."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, states, counts, *, more):
        y = self.inner(x).tanh() * (1 + len(states)) * counts["runs"]
        states.append(y.square().mean())
        counts["runs"] += 1
        more["last"] = [y]
        return y


@pytest.mark.parametrize("decision", ["raw", *RECOMPUTE, "recompute(segment=2)"])
def test_containers_that_a_module_is_given_are_the_callers_own(decision):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Fills() for _ in range(3))

        def forward(self, x):
            states, counts, more = [], {"runs": 1.0}, {}
            for block in self.blocks:
                x = block(x, states, counts, more=more)
            assert (len(states), counts["runs"], more["last"][0] is x) == (3, 4.0, True)
            return x.sum() + sum(states)

    def grads(text):
        torch.manual_seed(0)
        model = Net()
        with ActivationStore(model, text, min_bytes=0):
            loss = model(torch.randn(6, WIDTH))
        loss.backward()
        return [loss.detach(), *(weight.grad for weight in model.parameters())]

    check_same(grads(f"blocks.* : {decision}"), grads("keep"))
