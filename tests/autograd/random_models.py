"""Random models: trees of modules that do what models do to autograd, and ways to train them.

A tree is a tuple of a name and its parts, so that hypothesis can draw it and make it smaller. All modules map
(batch, time, WIDTH) to the same shape.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from actstore import tag

WIDTH = 8

Tree = tuple[Any, ...]


class Call(nn.Module):
    """A function of the input, without parts."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Around(nn.Module):
    """A function of a module and the input."""

    def __init__(self, inner: nn.Module, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner, x)


class Cubed(torch.autograd.Function):
    """Saves its input and its output, and can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.pow(3)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        return grad * 3 * x.square() + 0 * out * grad


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class Channels(nn.Module):
    """A module of (batch, channels, time)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Named(nn.Module):
    """Takes a tensor by name, and gives a dict with a tensor, one without gradient, and other things."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        y = self.inner(x)
        return {"y": y * scale, "seen": (y.detach(), 3), "none": None}


class UsesNamed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.named = Named(inner)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = self.named(x, scale=self.scale)
        return out["y"] + out["seen"][0]


class Mixed(nn.Sequential):
    """Its first half is in full precision under autocast too."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() if x.dtype == torch.bfloat16 else x
        on = torch.is_autocast_enabled("cpu")
        for i, part in enumerate(self):
            with torch.autocast("cpu", torch.bfloat16, enabled=on and i >= len(self) // 2):
                x = part(x)
        return x


class Shared(nn.Module):
    """One module under two names, one of them in a dict beside a module that is None."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.one = inner
        self.rest = nn.ModuleDict({"other": inner, "idle": nn.Identity()})
        self.register_module("gone", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.rest["other"](x * 2)


class Tied(nn.Module):
    """Two layers with one weight, around a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(torch.tanh(self.first(x))))


def _filtered(x: Tensor) -> Tensor:
    """Through complex numbers, of which there are none of half precision on a CPU."""
    x = x.float() if x.dtype == torch.bfloat16 else x
    return torch.fft.irfft(torch.fft.rfft(x) * (1 + 2j), n=WIDTH)


def _grad_off(inner: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = inner(x)
    return x * gate + inner(x)


def _grad_on_in_off(inner: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        held = x.detach().exp()
        with torch.enable_grad():
            y = inner(x)
    return y * held


def _halves(inner: nn.Module, x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((inner(torch.cat((b, a), -1))[..., : WIDTH // 2], a.exp()), -1)


def _written(inner: nn.Module, x: Tensor) -> Tensor:
    y = inner(x).clone()
    y[:, 0] *= 2
    return y.mul_(2).relu_()


def _gradient_scaled(inner: nn.Module, x: Tensor) -> Tensor:
    y = inner(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 0.5)
    return y


def _full_precision(inner: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return inner(x.float() if x.dtype == torch.bfloat16 else x)


def _by_value(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x) if bool(x.detach().sum() > 0) else inner(-x) + x


def _hooked(inner: nn.Module) -> nn.Module:
    """With hooks before, behind and in backward, which change what goes through."""
    layer = nn.Sequential(inner, nn.Tanh())
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    layer.register_forward_hook(lambda module, args, out: out + args[0].sin())
    layer.register_full_backward_hook(lambda module, given, out: (None if given[0] is None else given[0] * 0.5,))
    return layer


def _evaluated(inner: nn.Module) -> nn.Module:
    return Around(inner.eval(), lambda inner, x: inner(x))


def _frozen(inner: nn.Module) -> nn.Module:
    return Around(inner.requires_grad_(False), lambda inner, x: inner(x))


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "relu in place": lambda: Call(lambda x: F.relu(x * 1, inplace=True)),
    "prelu": nn.PReLU,
    "softmax": lambda: nn.Softmax(-1),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "batch norm": lambda: Channels(nn.BatchNorm1d(WIDTH)),
    "batch norm of all steps": lambda: Channels(nn.BatchNorm1d(WIDTH, momentum=None)),
    "instance norm": lambda: Channels(nn.InstanceNorm1d(WIDTH, affine=True)),
    "convolution": lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "pool": lambda: Channels(nn.MaxPool1d(3, 1, 1)),
    "dropout": lambda: nn.Dropout(0.3),
    "alpha dropout": lambda: nn.AlphaDropout(0.2),
    "feature dropout": lambda: nn.Dropout1d(0.3),
    "noise": lambda: Call(lambda x: x * torch.rand_like(x) + x * random.random()),
    "attention": Attention,
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True),
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "weight norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: orthogonal(nn.Linear(WIDTH, WIDTH)),
    "bilinear": lambda: Around(nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda inner, x: inner(x, x.cos())),
    "embedding": lambda: Around(nn.Embedding(WIDTH, WIDTH), lambda inner, x: x + inner(x.detach().argmax(-1))),
    "function": lambda: Call(Cubed.apply),
    "sorted": lambda: Call(lambda x: x.sort(-1).values * x.topk(1).values),
    "gathered": lambda: Call(lambda x: x.index_select(-1, torch.arange(WIDTH - 1, -1, -1))[:, [-1] * x.shape[1]]),
    "spectrum": lambda: Call(_filtered),
    "summed": lambda: Call(lambda x: x.cumsum(1) / (1 + x.logsumexp(-1, keepdim=True).square())),
    "expanded": lambda: Call(lambda x: x * x.mean(-1, keepdim=True).expand_as(x).sin()),
    "marked": lambda: Call(lambda x: tag((x * 2).sin(), "marked").tanh() * x),
    "standardised": lambda: Call(lambda x: (x - x.mean()) / (x.std() + 1)),
}

AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "residual": lambda inner: Around(inner, lambda inner, x: x + inner(x)),
    "named": UsesNamed,
    "shared": Shared,
    "tied": Tied,
    "hooked": _hooked,
    "evaluated": _evaluated,
    "frozen": _frozen,
    "flat": lambda inner: Around(inner, lambda inner, x: inner(x.reshape(-1, 2, WIDTH)).view(x.shape)),
    "twice": lambda inner: Around(inner, lambda inner, x: inner(inner(x))),
    "grad off": lambda inner: Around(inner, _grad_off),
    "grad on in off": lambda inner: Around(inner, _grad_on_in_off),
    "halves": lambda inner: Around(inner, _halves),
    "written": lambda inner: Around(inner, _written),
    "gradient scaled": lambda inner: Around(inner, _gradient_scaled),
    "full precision": lambda inner: Around(inner, _full_precision),
    "by value": lambda inner: Around(inner, _by_value),
    "detached": lambda inner: Around(inner, lambda inner, x: inner(x).detach() * x),
    "marked behind": lambda inner: Around(inner, lambda inner, x: tag(inner(x), "marked").sin() + x),
    "checkpoint": lambda inner: Around(inner, lambda inner, x: checkpoint(inner, x, use_reentrant=False)),
}


SEQUENCES: dict[str, type[nn.Sequential]] = {"sequence": nn.Sequential, "mixed": Mixed}


def trees() -> st.SearchStrategy[Tree]:
    """Trees of up to a dozen leaves."""
    return st.recursive(
        st.sampled_from(sorted(LEAVES)).map(lambda name: (name,)),
        lambda inner: (
            st.tuples(st.sampled_from(sorted(AROUND)), inner)
            | st.tuples(st.sampled_from(sorted(SEQUENCES)), st.lists(inner, min_size=2, max_size=5)).map(
                lambda drawn: (drawn[0], *drawn[1])
            )
        ),
        max_leaves=8,
    )


def grow(tree: Tree) -> nn.Module:
    """The module of a tree."""
    name, *parts = tree
    if name in SEQUENCES:
        return SEQUENCES[name](*map(grow, parts))
    return AROUND[name](grow(parts[0])) if parts else LEAVES[name]()


def build(forest: list[Tree], dtype: torch.dtype) -> nn.Module:
    """A sequence of trees within another, the same at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*map(grow, forest))).to(dtype)
