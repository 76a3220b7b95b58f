"""Llama: RMSNorm, rotary positions, grouped queries and SwiGLU; and its fine-tuning by low-rank adapters (LoRA)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actstore.bench.workloads import text
from actstore.bench.workloads.job import PARTS, Job, Kind, in_blocks
from actstore.bench.workloads.text import Batches, vocabulary
from actstore.bench.workloads.workload import Workload
from actstore.errors import ConfigError

HEADS_PER_GROUP = 4  # query heads per key-value head, where the model has as many
HIDDEN_RATIO = 3.5  # width of SwiGLU over that of the model, as in Llama 3 8B
ROTARY_BASE = 5e5
LORA_RANK = 8
LORA_SCALE = 2.0


class Rotary(nn.Module):
    """Rotary positions: the two halves of a head are real and imaginary parts, turned by the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        rates = ROTARY_BASE ** -torch.arange(0, 1, 2 / size)
        angles = torch.outer(torch.arange(length), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        length = x.shape[-2]
        return x * self.cos[:length] + torch.cat((-b, a), -1) * self.sin[:length]


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, work: Workload, rotary: Rotary) -> None:
        super().__init__()
        self.size = work.width // work.heads
        shared = self.size * max(1, work.heads // HEADS_PER_GROUP)
        self.rotary = rotary
        self.q = nn.Linear(work.width, work.width, bias=False)
        self.k = nn.Linear(work.width, shared, bias=False)
        self.v = nn.Linear(work.width, shared, bias=False)
        self.out = nn.Linear(work.width, work.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (line(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for line in (self.q, self.k, self.v))
        q, k = self.rotary(q).to(v.dtype), self.rotary(k).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, work: Workload, rotary: Rotary) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(work.width), Attention(work, rotary)
        self.norm2, self.mlp = nn.RMSNorm(work.width), SwiGLU(work.width, int(HIDDEN_RATIO * work.width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Llama(nn.Module):
    """A Llama: ``model(x, y)`` is the mean cross entropy of predicting the characters `y` after `x`."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(vocabulary()), work.width)
        self.rotary = Rotary(work.context, work.width // work.heads)
        self.blocks = nn.ModuleList(Block(work, self.rotary) for _ in range(work.layers))
        self.norm = nn.RMSNorm(work.width)
        self.head = nn.Linear(work.width, len(vocabulary()), bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.characters(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h)).float()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def check(work: Workload) -> None:
    """Raise ConfigError where the context is longer than the text, or a head has an odd width."""
    text.check(work)
    if work.width // work.heads % 2:
        raise ConfigError(f"--width {work.width} over --heads {work.heads}: rotary positions want an even number.")


KIND = Kind(
    title="a small Llama on English text",
    default=Workload("llama", layers=6, width=256, heads=8, context=256, batch=6),
    uses=("layers", "width", "heads", "context", "batch"),
    make=in_blocks(Llama, Batches),
    check=check,
    policies=PARTS,
)


class Adapted(nn.Module):
    """A frozen linear layer and its adapter: ``base(x) + LORA_SCALE * up(down(x))``, with `up` initialized to zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, LORA_RANK, bias=False)
        self.up = nn.Linear(LORA_RANK, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + LORA_SCALE * self.up(self.down(x))
        return out


def adapt(module: nn.Module) -> None:
    """Put an adapter at every linear layer inside `module`."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, Adapted(child))
        else:
            adapt(child)


def make_lora(work: Workload) -> Job:
    model = Llama(work)
    model.requires_grad_(False)
    adapt(model.blocks)
    model.head.requires_grad_(True)  # a new head, as for a new vocabulary
    model.to(work.device)
    return Job(work, model, model.blocks, Batches(work))


LORA = replace(
    KIND,
    title="a LoRA fine-tune of a frozen Llama on English text",
    default=replace(KIND.default, model="lora"),
    make=make_lora,
)
