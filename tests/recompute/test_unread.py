"""Outputs of excepted parts that a recomputed module does not read are not held for its second run."""

import pytest
import torch
from torch import nn

from actstore import ActivationStore
from actstore.errors import StateError
from actstore.recompute import recomputed_module
from tests.autograd.checks import check_drained, check_same, gc_off
from tests.recompute.regions import Runs

POLICIES = ["*.attention : keep; [01] : recompute", "*.attention : raw @ disk; [01] : recompute(raw)"]


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """Other tests of this process may have called the compiler, after which outputs are held."""
    monkeypatch.setattr(recomputed_module, "compiles", lambda: False)


class Attention(nn.Module):
    """Returns its weights, too, as attention of Transformers does."""

    def __init__(self):
        super().__init__()
        self.qkv, self.drop = nn.Linear(16, 48), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = self.drop(torch.softmax(q @ k.transpose(-1, -2), -1))
        return weights @ v, weights


class Block(nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.attention, self.after, self.reads = Attention(), nn.Linear(16, 16), reads

    def forward(self, x):
        outputs = self.attention(x)
        factor = self.reads(outputs[1])
        return torch.tanh(self.after(outputs[0])) * factor


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def drops(weights):
    return 1.0


READS = {
    "a sum": lambda weights: weights.sum(),
    "without a graph": lambda weights: weights.detach().mean(),
    "in a list": lambda weights: torch.cat([weights[:0], weights]).mean(),
    "a Function": lambda weights: Square.apply(weights).mean(),
    "an operator": lambda weights: torch.ops.aten.sin(weights).mean(),
    "a number": lambda weights: float(weights.detach().max()),
}


def step(policy, reads, steps=2):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(reads), Block(reads)), torch.randn(4, 32, 16)
    store = ActivationStore(model, policy, min_bytes=0)
    torch.manual_seed(1)
    for _ in range(steps):
        with store:
            loss = model(x).square().sum()
        held = store.report().held_bytes
        loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())], held, store


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", [1, 2])
def test_what_a_block_drops_is_not_held(policy, steps):
    wanted, _, _ = step("keep", drops, steps)
    with gc_off():
        found, held, store = step(policy, drops, steps)
        check_drained(store)
    check_same(found, wanted)
    _, more, _ = step(policy, READS["a sum"], steps)
    nbytes = 2 * 4 * 32 * 32 * 4
    assert more - held == (0 if "disk" in policy else nbytes)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", READS)
def test_what_a_block_reads_comes_back(how, policy):
    check_same(step(policy, READS[how])[0], step("keep", READS[how])[0])


class Returns(Block):
    def forward(self, x):
        y, weights = self.attention(x)
        return torch.tanh(self.after(y)), weights


def test_what_a_block_returns_is_read_outside():
    def gradients(policy):
        torch.manual_seed(0)
        model = nn.ModuleList([Returns(drops)])
        store = ActivationStore(model, policy, min_bytes=0)
        with store:
            y, weights = model[0](torch.ones(4, 32, 16))
            loss = y.sum() + weights.square().sum()
        loss.backward()
        return [weight.grad for weight in model.parameters()]

    check_same(gradients("*.attention : keep; 0 : recompute"), gradients("keep"))


def test_a_second_run_that_reads_more_is_refused():
    more = Runs()  # no list whose entries come back for the second run

    def reads(weights):
        return weights.sum() if more else 1.0

    model = nn.Sequential(Block(reads))
    with ActivationStore(model, "*.attention : keep; 0 : recompute", min_bytes=0):
        loss = model(torch.ones(4, 32, 16)).sum()
    more.append(True)
    with pytest.raises(StateError, match=r"part=0\.attention: the second run .* reads an output that the first"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of Dynamo
def test_functions_that_are_compiled_stay_compiled(monkeypatch):
    monkeypatch.undo()
    torch._dynamo.reset()
    scaled = torch.compile(lambda x: x.tanh().cos(), backend="aot_eager", fullgraph=True)

    class Compiled(Block):
        def forward(self, x):
            return scaled(super().forward(x))

    def gradients(policy):
        torch.manual_seed(0)
        model, x = nn.Sequential(Compiled(drops), Compiled(drops)), torch.randn(4, 32, 16)
        store = ActivationStore(model, policy, min_bytes=0)
        torch.manual_seed(1)
        with store:
            loss = model(x).square().sum()
        loss.backward()
        return [weight.grad for weight in model.parameters()]

    check_same(gradients(POLICIES[0]), gradients("keep"))
    torch._dynamo.reset()
