"""Small models to compile, each with a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from actstore import ActivationStore, SampleErrors

WIDTH = 64


class GeluBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GeluBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ReluNet(nn.Module):
    """ReLU on the output of a linear layer, and on that of a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.norm, self.head = nn.BatchNorm1d(2 * WIDTH), nn.Linear(2 * WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.head(torch.relu(self.norm(self.second(x))))


class AttentionNet(nn.Module):
    """Attention written out, so that softmax and its scores stand in the graph, and a loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.proj, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, -1) @ v
        logits = self.head(x + self.drop(self.proj(seen)))
        wanted = torch.arange(logits[..., 0].numel(), device=logits.device) % 16
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(16, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.layers(image).mean((2, 3)))


class WideMlp(Mlp):
    """A model whose activations take more than its gradients."""


class Deep(Mlp):
    """A model of more blocks, with activations of a MiB and more."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GeluBlock() for _ in range(5))


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 256), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class GatedMlp(Mlp):
    """A model of blocks whose gradient reads what is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(3))


class HeadBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class Heads(Mlp):
    """A model whose attention is one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HeadBlock() for _ in range(4))


class FusedAttention(nn.Module):
    """Queries, keys and values are one product; rows of a width that is no multiple of a group, in odd numbers."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(96), nn.Linear(96, 3 * 96), nn.Linear(96, 96)
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 24)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v.tanh() if self.apart else v)
        return self.proj(seen.transpose(1, 2).flatten(2))


class ReadTwice(nn.Module):
    """Attention as one operator, whose result its own backward reads, and a view of it a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.proj(x).unflatten(-1, (4, -1)).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(heads, heads.cos(), heads.sin())
        return self.proj(seen.transpose(1, 2).flatten(2))


class DeepConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean((2, 3)))


BATCHES = {
    Mlp: lambda: torch.randn(32, WIDTH),
    WideMlp: lambda: torch.randn(1024, WIDTH),
    FusedAttention: lambda: torch.randn(6, 33, 96),
    Deep: lambda: torch.randn(4096, WIDTH),
    Heads: lambda: torch.randn(8, 128, WIDTH),
    GatedMlp: lambda: torch.randn(2048, WIDTH),
    ReadTwice: lambda: torch.randn(8, 32, WIDTH),
    ReluNet: lambda: torch.randn(64, WIDTH),
    AttentionNet: lambda: torch.randn(2, 32, WIDTH),
    Convolutions: lambda: torch.randn(8, 3, 16, 16),
    DeepConvolutions: lambda: torch.randn(8, 3, 32, 32),
}


def make(kind: Callable[..., nn.Module], *arguments: Any) -> tuple[nn.Module, Tensor]:
    """A model and its batch, equal in each call."""
    torch.manual_seed(0)
    return kind(*arguments), BATCHES[kind]()


def gradients(model: nn.Module, x: Tensor, store: ActivationStore | None = None) -> dict[str, Tensor]:
    """The gradients of a step, by name."""
    model.zero_grad()
    torch.manual_seed(1)
    if store is None:
        loss = model(x).float().square().mean()
    else:
        with store:
            loss = model(x).float().square().mean()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compiled(
    kind: Callable[..., nn.Module], policy: Any = "int8", *arguments: Any, backend: str = "aot_eager", **options: Any
) -> tuple[nn.Module, Tensor, ActivationStore]:
    """A model that is compiled with a policy, its batch and its store."""
    model, x = make(kind, *arguments)
    store = ActivationStore(model, policy, observe=[SampleErrors(every=0)], min_bytes=0)  # samples are held, too
    store.compile(backend=backend, **options)
    return model, x, store


def plain(kind: Callable[..., nn.Module], *arguments: Any, backend: str = "aot_eager") -> dict[str, Tensor]:
    """The gradients of the same model compiled without a store."""
    model, x = make(kind, *arguments)
    model.compile(backend=backend)
    return gradients(model, x)


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The relative error of all gradients together."""
    assert list(found) == list(wanted)
    wrong = sum(float((found[name] - wanted[name]).double().square().sum()) for name in wanted)
    return (wrong / sum(float(grad.double().square().sum()) for grad in wanted.values())) ** 0.5
