"""Saved tensors of a recomputed module that are read before its forward has ended: it runs again in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from actstore import ActivationStore
from actstore.errors import StateError
from tests.autograd.checks import check_drained, check_same, gc_off

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES = [
    "recompute",
    "recompute(raw @ disk)",
    "0 : recompute(segment=2); 1 : recompute(segment=2)",
    "*.inner : recompute",
    "recompute(decisions=kept)",
]


class Slope(nn.Module):
    """Scales its output by a slope that it computes in forward, between changes of its own state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Tanh())
        self.register_buffer("early", torch.ones(8))
        self.register_buffer("late", torch.ones(8))
        self.register_buffer("other", torch.ones(()))
        self.count, self.last = 0, torch.ones(8)
        self.seen: list[float] = []
        self.facts: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.early.mul_(1.1)
        self.count += 1
        self.seen.append(random.random())
        best = x.argmax(-1, keepdim=True)  # a decision before the second run, and one behind it
        y = self.inner(x * self.early + self.seen[-1] / self.count) + best
        (slope,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        self.late.mul_(1.2).add_(slope.abs().mean())
        self.count += 1
        self.other = self.other + self.late.mean()
        self.last = slope.mean(0)
        self.facts["last"] = float(self.last.sum())
        del self.seen[:-3]
        return y * slope.detach().clamp(-0.5, 0.5) * y.max() * self.late + self.count + self.other + self.last


def train(store: bool, policy: str, build: Callable[[], nn.Module]) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    model = build()
    found: list[Any] = []
    context = ActivationStore(model, policy, min_bytes=0) if store else None
    for _ in range(3):
        x = torch.randn(4, 8, requires_grad=True)
        if context is None:
            y = model(x)
        else:
            with context:
                y = model(x)
        y.square().mean().backward()
        found += [y.detach(), x.grad, torch.rand(()), torch.tensor(random.random())]
    for part in model.modules():
        if isinstance(part, Slope):
            found += [part.last, torch.tensor([part.count, *part.seen, part.facts["last"]])]
    return [*found, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_forward_changes_changes_once(policy: str, depth: int) -> None:
    def build() -> nn.Module:
        layers = [Slope() if depth == 1 else nn.Sequential(Slope(), nn.Linear(8, 8), Slope()) for _ in range(2)]
        return nn.Sequential(nn.Linear(8, 8), *layers)

    check_same(train(True, policy, build), train(False, policy, build))


class Views(nn.Module):
    """Writes to a buffer by way of another one, which no copy can stand in for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.ones(2, 8))
        self.register_buffer("row", self.all[0])
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.row.add_(1)
        y = self.linear(x).exp()
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * slope.detach() + self.all.sum(0)


def test_a_write_that_cannot_be_undone_is_refused() -> None:
    model = nn.Sequential(Views())
    with ActivationStore(model, "0 : recompute", min_bytes=0), pytest.raises(StateError, match=r"must not write to it"):
        model(torch.randn(4, 8, requires_grad=True))
    assert torch.equal(model[0].all, torch.tensor([[2.0], [1.0]]).expand(2, 8))


class Hooked(nn.Module):
    """Its output has a hook, which the next module's own gradient goes through."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda grad: 0.5 * grad)
        return y


class OwnSlope(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * slope.detach()


@pytest.mark.parametrize("policy", ["[0-9] : recompute", "[0-9] : recompute(segment=2)", "1 : recompute(raw @ disk)"])
def test_hooks_of_inputs_act_on_a_gradient_that_the_forward_computes(policy: str) -> None:
    """A second run without them gave a slope, and so a gradient, that was twice as large."""
    model, x = nn.Sequential(Hooked(), OwnSlope(nn.Tanh())), torch.randn(4, 8, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    with ActivationStore(model, policy, min_bytes=0):
        loss = model(x).sum()
    (found,) = torch.autograd.grad(loss, x)
    check_same(found, wanted)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


class BySlope(OwnSlope):
    def forward(self, x: Tensor) -> Tensor:
        given = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(given).sum(), given, allow_unused=True)
        return x if slope is None else x * slope


def test_a_gradient_through_a_part_that_does_not_run_again_is_refused() -> None:
    model, x = nn.Sequential(BySlope(Halves())), torch.randn(4, 8, requires_grad=True)
    with ActivationStore(model, "0.inner : keep; 0 : recompute", min_bytes=0):
        loss = model(x).sum()
    with pytest.raises(StateError, match="computes a gradient through a part that does not run again"):
        loss.backward()


class Watches(nn.Module):
    """A hook sees gradients of its input and its output together, until it is removed."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.handle = register_multi_grad_hook((x, y), lambda grads: None)
        return y


class DifferentiableSlope(OwnSlope):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.sin()


@pytest.mark.parametrize("policy", ["[0-9] : recompute", "[0-9] : recompute(segment=2)", "1 : recompute(raw)"])
def test_a_hook_of_an_input_holds_nothing_when_it_is_removed(policy: str) -> None:
    """It held the graph of a second run, which held the region's input, and so the hook."""
    model, x = nn.Sequential(Watches(), DifferentiableSlope(nn.GELU())), torch.randn(4, 8, requires_grad=True)
    store = ActivationStore(model, policy, min_bytes=0)
    with gc_off():
        with store:
            loss = model(x).sum()
        loss.backward()
        model[0].handle.remove()
        del loss
        check_drained(store)
