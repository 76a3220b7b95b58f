"""A small GPT."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actstore.bench.workloads import text
from actstore.bench.workloads.job import PARTS, Kind, in_blocks
from actstore.bench.workloads.text import Batches, vocabulary
from actstore.bench.workloads.workload import Workload


class Attention(nn.Module):
    """Self-attention with one projection for query, key and value."""

    def __init__(self, work: Workload, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = work.heads, work.dropout, causal
        self.qkv = nn.Linear(work.width, 3 * work.width)
        self.proj = nn.Linear(work.width, work.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, work: Workload, causal: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(work.width)
        self.attn = Attention(work, causal)
        self.norm2 = nn.LayerNorm(work.width)
        self.mlp = nn.Sequential(
            nn.Linear(work.width, 4 * work.width), nn.GELU(), nn.Linear(4 * work.width, work.width)
        )
        self.drop: Callable[[Tensor], Tensor] = nn.Dropout(work.dropout) if work.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A GPT: ``model(x, y)`` is the mean cross entropy of predicting the characters `y` after `x`."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(vocabulary()), work.width)
        self.positions = nn.Embedding(work.context, work.width)
        self.blocks = nn.ModuleList(Block(work) for _ in range(work.layers))
        self.norm = nn.LayerNorm(work.width)
        self.head = nn.Linear(work.width, len(vocabulary()), bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.characters(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


KIND = Kind(
    title="a small GPT on English text",
    default=Workload(),
    uses=("layers", "width", "heads", "context", "batch", "dropout"),
    make=in_blocks(GPT, Batches),
    check=text.check,
    policies=PARTS,
)
