"""Random models to compile, random policies and ways to train: equal for equal seeds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

from actstore import ActivationStore
from tests.autograd.random_modules import Call

WIDTH = 32
WAYS = "once", "retained", "two forwards", "other batch", "dropped", "fails in forward", "fails in backward"
EXACT = "keep", "raw", "derive", "raw @ host", "raw @ disk"
LOSSY = "int8", "keep", "int8 @ host", "int8 @ disk"


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Twice(nn.Module):
    """One module, called twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, -1) @ v


class FusedAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 8)).transpose(1, 2).chunk(3, 1)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).chunk(2, -1)
        return value * nn.functional.silu(gate)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Break(nn.Module):
    """A graph break between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x)


FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    nn.functional.gelu,
    nn.functional.silu,
    nn.functional.leaky_relu,
    nn.functional.hardtanh,
    nn.functional.softplus,
    nn.functional.elu,
    lambda x: x * x.sigmoid(),
    lambda x: x.abs().clamp(0.1, 2).sqrt(),
    lambda x: torch.where(x > 0, x, 0.5 * x),
    lambda x: (x - x.amax(-1, keepdim=True)).exp(),
    lambda x: x.clone().mul_(2).add_(1),
    lambda x: torch.maximum(x, x.roll(1, -1)),
    lambda x: x.sort(-1).values,
    lambda x: x.cumsum(1) / x.shape[1],
    lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2).sin(),
    lambda x: x / (1 + x.square().mean(-1, keepdim=True)).sqrt(),
    lambda x: x * torch.pow(x.square().mean(-1, keepdim=True) + 0.01, -0.5),
    lambda x: nn.functional.normalize(x, dim=-1),
    lambda x: x.sin() / (x.abs() + 0.1),
    lambda x: nn.functional.relu6(x * 1, inplace=True),
)


# -- drawn by a seed ---------------------------------------------------------------------------------------------------


def layer(draw: Random, depth: int = 0) -> nn.Module:
    if draw.random() < 0.35:
        return Call(draw.choice(FUNCTIONS))
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.Dropout(0.3),
        lambda: nn.Softmax(-1),
        Attention, FusedAttention, Gate, Convolution, Break,
    ]  # fmt: skip
    if depth < 2:
        kinds += [lambda: Residual(chain(draw, depth + 1)), lambda: Twice(chain(draw, depth + 1))]
    return draw.choice(kinds)()


def chain(draw: Random, depth: int = 0) -> nn.Sequential:
    return nn.Sequential(*(layer(draw, depth) for _ in range(draw.randint(2, 4))))


class Model(nn.Module):
    """Three chains and a head. Forward raises behind the second chain where it is told so."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(chain(draw) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if fail and number == 1:
                torch._dynamo.graph_break()
                raise KeyError("the test's")
        return self.head(x)


def make(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model(Random(seed))


def policy(draw: Random, decisions: tuple[str, ...], *, recompute: bool = False) -> str:
    """Rules for each block; some recompute a block."""
    decisions = (*decisions, "recompute") if recompute else decisions
    if draw.random() < 0.5:
        return draw.choice([each for each in decisions if each not in ("keep", "recompute")])
    rules = [f"blocks.{number} : {draw.choice(decisions)}" for number in range(3)]
    return "; ".join([*rules, f"* : {decisions[0]}"])


def train(model: nn.Module, way: str, autocast: bool, store: ActivationStore | None) -> dict[str, Any]:
    """Two steps in one way. Returns the losses and the gradients of both by name."""
    with functorch.patch(donated_buffer=way != "retained"):
        return _train(model, way, autocast, store)


def _train(model: nn.Module, way: str, autocast: bool, store: ActivationStore | None) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def forward(x: Tensor, fail: bool = False) -> Tensor:
        with store or nullcontext(), torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            return model(x, fail).float().square().mean()

    def take(step: int, *losses: Tensor) -> None:
        for number, loss in enumerate(losses):
            found[f"{step} loss {number}"] = loss.detach()
        for name, parameter in model.named_parameters():
            found[f"{step} {name}"] = None if parameter.grad is None else parameter.grad.clone()

    for step in range(2):
        model.zero_grad()
        torch.manual_seed(step)
        x = torch.randn(4 if way != "other batch" else 4 + step, 16, WIDTH, requires_grad=way == "once")
        if way == "dropped":
            forward(x)
        elif way == "fails in forward":
            try:
                forward(x, fail=True)
            except KeyError:
                model.zero_grad()
        loss = forward(x)
        if way == "fails in backward":
            head: Any = model.head
            handle = head.weight.register_hook(_fail)
            try:
                loss.backward()
            except KeyError:
                model.zero_grad()
            handle.remove()
            loss = forward(x)
        losses = [loss, forward(2 * x)] if way == "two forwards" else [loss]
        for each in losses:
            each.backward(retain_graph=way == "retained")
        if way == "retained":
            loss.backward()
        take(step, *losses)
        del loss, losses
    return found


def _fail(grad: Tensor) -> Tensor:
    raise KeyError("the test's")
