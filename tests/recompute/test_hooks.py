"""When a recomputed region runs again, what it leaves then, and what its calls share."""

import gc
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import GraphExecGroup, set_checkpoint_early_stop

from actstore import ActivationStore
from actstore.errors import MutationError, StateError
from actstore.model.weights import Weights
from actstore.recompute.hooks import SavedSlot
from tests.autograd.checks import check_same, gc_off
from tests.autograd.random_models import build
from tests.recompute.regions import Runs

WIDTH = 8


class Twice(torch.autograd.Function):
    """The square, whose backward reads its saved tensor twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0] + ctx.saved_tensors[0])


class Cell(nn.Module):
    """Counts its runs, which `change` may make different."""

    def __init__(self, change=None):
        super().__init__()
        self.inner, self.runs, self.change = nn.Linear(WIDTH, WIDTH), Runs(), change

    def forward(self, x):
        self.runs.append(1)
        x = torch.tanh(self.inner(x))
        if self.change is not None and len(self.runs) > 1:
            x = self.change(self, x)
        return Twice.apply(x) + 1


def filled():
    """Return how many slots hold a tensor."""
    return sum(1 for each in gc.get_objects() if type(each) is SavedSlot and each.tensors)


def stored(model, x):
    with ActivationStore(model, "cell : recompute", min_bytes=0):
        return model(x)


class Model(nn.Module):
    def __init__(self, change=None, calls=1):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.calls = Cell(change), calls

    def forward(self, x):
        for _ in range(self.calls):
            x = self.cell(x)
        return x


def input_of():
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)


def test_a_tensor_may_be_read_twice_in_a_backward():
    model, x = Model(), input_of()
    wanted = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    check_same(torch.autograd.grad(stored(model, x).sum(), [x, *model.parameters()]), wanted)


def test_a_read_outside_of_backward_leaves_nothing():
    model, x = Model(), input_of()
    with gc_off():
        y = stored(model, x)
        tanh = y.grad_fn.next_functions[0][0].next_functions[0][0]
        check_same([tanh._saved_result], [torch.tanh(model.cell.inner(x))])
        assert (len(model.cell.runs), filled()) == (2, 0)


@pytest.mark.parametrize("grouped", [True, False])
def test_backwards_of_a_group_run_a_region_once(grouped):
    model, x = Model(), input_of()
    y = stored(model, x)
    tanh = y.grad_fn.next_functions[0][0].next_functions[0][0]
    with GraphExecGroup() if grouped else torch.enable_grad():
        assert tanh._saved_result is not None
        y.sum().backward()
    assert len(model.cell.runs) == (3 if grouped else 4)  # one for the second read of one tensor


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _, x: x[:2], "tensor 3 that it saves is float32 2x8, and was float32 3x8"),
        (lambda cell, x: cell.inner(x), "it saves 6 tensors, and saved 4"),
        (lambda *_: 1 / 0, "division"),
    ],
)
def test_a_run_that_differs_leaves_nothing(change, words):
    model, x = Model(change), input_of()
    with gc_off(), set_checkpoint_early_stop(False):
        y = stored(model, x)
        with pytest.raises((StateError, ZeroDivisionError), match=words):
            y.sum().backward()
        assert filled() == 0
        del y


@pytest.mark.parametrize("early", [True, False])
def test_a_run_ends_with_the_last_tensor_that_backward_needs(early):
    runs = []
    model = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Identity()))
    model[0][1].register_forward_pre_hook(lambda *_: runs.append(1))
    x = input_of()
    with set_checkpoint_early_stop(early), ActivationStore(model, "0 : recompute", min_bytes=0):
        y = model(x)
    y.sum().backward()
    assert len(runs) == (1 if early else 2)


def test_calls_that_are_alike_hold_their_weights_once():
    model, x = Model(calls=5), input_of()
    gc.collect()
    y = stored(model, x)
    assert sum(type(each) is Weights for each in gc.get_objects()) == 1
    y.sum().backward()


def test_calls_with_other_weights_do_not():
    model, x = Model(), input_of()
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2)]

    def run(store):
        y = x
        with store or torch.enable_grad():
            for i in (0, 0, 1, 0):
                model.cell.inner.weight = weights[i]
                y = model(y)
        return torch.autograd.grad(y.sum(), [x, *weights])

    check_same(run(ActivationStore(model, "cell : recompute", min_bytes=0)), run(None))


def test_no_call_takes_the_writes_of_another_ones_second_run_for_its_own():
    def scales(cell, x):
        if len(cell.runs) > 2:
            with torch.no_grad():
                cell.inner.weight.mul_(2)
        return x

    model, x = Model(scales, calls=2), input_of()
    y = stored(model, x)
    with pytest.raises(MutationError, match=r"parameter inner\.weight of a Cell that is recomputed"):
        y.sum().backward()


def test_each_call_runs_again_under_its_own_autocast():
    model, x = Model(), input_of()

    def run(store):
        y = x
        with store or torch.enable_grad():
            for enabled in (False, True, True, False):
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    y = model(y).float()
        return torch.autograd.grad(y.sum(), [x, *model.parameters()])

    check_same(run(ActivationStore(model, "cell : recompute", min_bytes=0)), run(None))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_no_compiler_sees_a_region():
    class Tanh(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph.forward

    @torch.compile(backend=backend)
    def loss(x):
        return model(x).cos().sum()

    torch._dynamo.reset()
    model = nn.Sequential(Tanh(), nn.Linear(WIDTH, WIDTH))
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        y = loss(input_of())
    y.backward()
    assert any("cos" in code for code in graphs)
    assert not any("tanh" in code for code in graphs)


def test_a_region_imports_no_compiler():
    code = """
import sys, torch, actstore
model = torch.nn.Sequential(torch.nn.Tanh())
with actstore.ActivationStore(model, "0 : recompute", min_bytes=0):
    loss = model(torch.ones(2, requires_grad=True)).sum()
loss.backward()
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Scribbles(torch.autograd.Function):
    """Its backward writes to what it has saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0].mul_(grad)


def test_a_later_run_ends_before_a_backward_inside_of_it_writes_to_what_it_saved():
    class BySlope(nn.Module):
        def forward(self, x):
            given = x.detach().requires_grad_()
            return x * torch.autograd.grad(Scribbles.apply(given * 2).sum(), given)[0]

    model, x = nn.Sequential(BySlope()), input_of()
    wanted = torch.autograd.grad(model(x).sum(), x)
    with ActivationStore(model, "0 : recompute", min_bytes=0):
        y = model(x).sum()
    check_same(torch.autograd.grad(y, x), wanted)


class Scribbler(nn.Module):
    def forward(self, x):
        return Scribbles.apply(x)


@pytest.mark.parametrize("decision", ["keep", "derive", "raw"])
def test_a_backward_that_writes_to_a_result_that_a_rule_keeps(decision):
    """Plain PyTorch refuses the second backward. So does a kept result; a payload is decoded for each."""
    model, x = nn.Sequential(Scribbler()), input_of()
    wanted = torch.autograd.grad(2 * model(x).sum(), x)
    with ActivationStore(model, f"*/@aten.cos : {decision}; 0 : recompute", min_bytes=0):
        y = 2 * model(x).sum()
    check_same(torch.autograd.grad(y, x, retain_graph=True), wanted)
    if decision == "raw":
        check_same(torch.autograd.grad(y, x), wanted)
    else:
        with pytest.raises(MutationError, match=r"saved at 0\[1\], is at version 1"):
            torch.autograd.grad(y, x)


def test_a_result_is_stored_in_inference_mode():
    """Views of a norm's result are its results, too, and wait until the next operator."""
    forest = [("sequence", ("encoder",), ("inference mode", ("linear",)))]
    x = torch.randn(2, 4, WIDTH, requires_grad=True)

    def gradient(*policy):
        model = build(forest, torch.float32)
        torch.manual_seed(1)
        with ActivationStore(model, *policy, min_bytes=0) if policy else nullcontext():
            y = model(x).sum()
        return torch.autograd.grad(y, x)

    for decision in ("keep", "raw", "raw @ disk"):
        check_same(gradient(f"*/@norm : {decision}; 0.* : recompute; * : keep"), gradient())


class Scored(nn.Module):
    """Computes scores that choose and need no gradient, as an indexer of sparse attention does."""

    def __init__(self, *, scores):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.scores = nn.Linear(64, 64), nn.Linear(64, 64), scores

    def forward(self, x):
        if self.scores:
            x = x + torch.stack([torch.tanh(self.a(x) * each).exp().mean() for each in range(1, 8)]).argmax()
        return torch.tanh(self.b(x))


def test_what_nothing_reads_is_free_when_the_run_ends():
    def peak(model):
        x = torch.randn(256, 64, requires_grad=True)
        store = ActivationStore(model, "0 : recompute", min_bytes=0)
        with store:
            loss = model(x).sum()
        loss.backward()
        return store.report().peak_held_bytes

    inner = 4 * 256 * 64 + 64  # what the scores are added to, and their choice
    assert peak(nn.Sequential(Scored(scores=True))) <= peak(nn.Sequential(Scored(scores=False))) + inner
