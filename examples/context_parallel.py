"""Context parallelism (Ulysses): torchrun --nproc-per-node 2 examples/context_parallel.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DEVICE, HEADS, STEPS, WIDTH, Block, Transformer, batch, compare, start
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from actstore import ActivationStore

# Blocks run again in backward. Their exchanges do not: what they return waits in host memory.
POLICY = "@blocks/@collective : raw @ host; @blocks : recompute"


def exchange(x, give, get):
    """Give each rank its part of dimension `give`, and get all of dimension `get`, which was split over ranks."""
    each = [1] * dist.get_world_size()
    parts = torch.stack(x.chunk(len(each), give))
    return torch.cat(list(all_to_all_single_autograd(parts, each, each, dist.group.WORLD)), get)


class Attend(nn.Module):
    """Attention of all tokens to all earlier ones. A rank has a part of the tokens, and for a while a part of heads."""

    def forward(self, *parts):
        heads = [exchange(part, 2, 1).transpose(1, 2) for part in parts]
        return exchange(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2), 1, 2)


class LongBlock(Block):
    def __init__(self):
        super().__init__()
        self.attend = Attend()

    def forward(self, x):
        y = self.norm1(x)
        parts = [f(y).unflatten(-1, (-1, WIDTH // HEADS)) for f in (self.q, self.k, self.v)]
        x = x + self.proj(self.attend(*parts).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def train(make_store):
    model = Transformer()
    model.blocks = nn.ModuleList(LongBlock() for _ in model.blocks)
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = make_store(model)
    losses = []
    for step in range(STEPS):
        x, y = (tokens.chunk(dist.get_world_size(), 1)[dist.get_rank()] for tokens in batch(step))
        with store:
            loss = (model(x) - y).square().mean()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(model.parameters()), store


if __name__ == "__main__":
    start()
    compare(train, lambda model: ActivationStore(model, POLICY, min_bytes="64KiB"))
