"""A small Llama, and its split over ranks: norms and residuals have a part of the tokens, FSDP2 shards the weights."""

import torch
import torch.nn.functional as F
from common import HEADS, WIDTH
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def rotate(x: Tensor) -> Tensor:
    """Rotate pairs of elements by an angle for each position."""
    size = x.shape[-1] // 2
    frequencies = 10000 ** (-torch.arange(size, device=x.device) / size)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        seen = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.wo(seen.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.output(self.norm(x)) - y).square().mean()


def apply_tp(model, mesh):
    """Split heads and feed-forward networks over the ranks, and the tokens between them."""
    split = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    rows = RowwiseParallel(output_layouts=Shard(1))
    plan = {"attention": split, "feed_forward": split, "attention.wo": rows, "feed_forward.w2": rows}
    plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
    plan |= {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    first = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
    last = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, {"layers.0": first, "norm": SequenceParallel(), "output": last})


def apply_fsdp(model, mesh):
    """Shard the weights of each layer."""
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
