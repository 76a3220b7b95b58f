"""Small models of every kind, each with a batch and a loss; built from a seed, so that two are equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Block(nn.Module):
    """Attention over q, k and v, which are views of one projection, and an MLP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)]
        seen = F.scaled_dot_product_attention(*heads, dropout_p=self.dropout, is_causal=True)
        x = x + self.drop(self.proj(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Embedding, blocks, and a head that shares the embedding's weight."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2),
            nn.BatchNorm2d(8), nn.SiLU(),
        )  # fmt: skip
        self.head = nn.Linear(8, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.layers(image).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 12, num_layers=2, batch_first=True)
        self.gru = nn.GRU(12, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0][:, -1])


class Lora(nn.Module):
    """Frozen layers with small trained ones beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(2))
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return x


class Repeated(nn.Module):
    """One layer called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.inner(x)
        return self.head(x)


class Scaled(nn.Module):
    """Takes a tensor by position, one by name, one in a dict and one in a nested list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor, extra: dict[str, Any]) -> dict[str, Any]:
        y = self.inner(x) * scale * extra["gain"] + extra["parts"][0][0].sin() * extra["factor"]
        return {"y": y, "rest": [y.cos(), None]}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(x, scale=x.exp(), extra={"gain": gain, "parts": [[x.neg()], 3], "factor": 0.5})
            x = out["y"] + out["rest"][0]
        return x


@dataclass(frozen=True)
class Case:
    """A model, its batch, and the modules that a bare recompute wraps."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.dtype], tuple[Tensor, ...]]
    recompute: str


def _features(*shape: int) -> Callable[[torch.dtype], tuple[Tensor, ...]]:
    return lambda dtype: (torch.randn(*shape, dtype=torch.float64).to(dtype),)


def _tokens(_: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.randint(0, 11, (2, 6)),)


def _images(dtype: torch.dtype) -> tuple[Tensor, ...]:
    image = torch.randn(2, 3, 10, 10, dtype=torch.float64).to(dtype)
    return (image.contiguous(memory_format=torch.channels_last),)


def _nested(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(3, WIDTH, dtype=torch.float64).to(dtype), torch.rand(WIDTH, dtype=torch.float64).to(dtype)


CASES = {
    "mlp": Case(Mlp, _features(5, WIDTH), "blocks.*"),
    "transformer": Case(Transformer, _tokens, "blocks.*"),
    "dropout": Case(lambda: Transformer(0.25), _tokens, "blocks.*"),
    "conv": Case(lambda: ConvNet().to(memory_format=torch.channels_last), _images, "layers"),
    "recurrent": Case(Recurrent, _features(3, 5, WIDTH), "lstm"),
    "lora": Case(Lora, _features(5, WIDTH), "base.*"),
    "repeated": Case(Repeated, _features(5, WIDTH), "inner"),
    "nested": Case(Nested, _nested, "blocks.*"),
}

AUTOCAST = [name for name in CASES if name != "recurrent"]  # oneDNN has no bfloat16 LSTM on every CPU

LOSSLESS = (
    *("keep", "raw", "raw @ host", "raw @ disk", "recompute", "recompute(raw)", "recompute(raw @ disk)"),
    *("zmask", "zmask(expack) @ disk", "recompute(zmask @ host)", "derive", "derive(raw @ disk)"),
)


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its batch, the same at every call."""
    torch.manual_seed(0)
    case = CASES[name]
    return case.model().to(dtype), case.batch(dtype)


def policy_of(name: str, decision: str) -> str:
    """The text of a policy: `decision`, for the modules that the model wants recomputed when it recomputes."""
    return f"{CASES[name].recompute} : {decision}" if decision.startswith("recompute") else decision
