"""Expert parallelism: torchrun --nproc-per-node 2 examples/expert_parallel.py"""

import torch
import torch.distributed as dist
from common import DEVICE, STEPS, WIDTH, Transformer, batch, compare, start
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from actstore import ActivationStore

EACH = 2  # experts of a rank
# Blocks run again in backward. Their exchanges do not: what they return waits in host memory.
POLICY = "blocks.*.dispatch : raw @ host; blocks.*.combine : raw @ host; @blocks : recompute"


class Dispatch(nn.Module):
    """Sends rows to the ranks of their experts, and returns how many came from each rank for each expert."""

    def forward(self, rows, counts):
        came = all_to_all_single(counts, None, None, dist.group.WORLD)
        return exchange(rows, came, counts), came


class Combine(nn.Module):
    """Sends rows back to where they came from."""

    def forward(self, rows, counts, came):
        return exchange(rows, counts, came)


def exchange(rows, come, go):
    return all_to_all_single_autograd(rows, come.sum(1).tolist(), go.sum(1).tolist(), dist.group.WORLD)


class Mixture(nn.Module):
    """Experts in place of an MLP: each token goes to one of them, which may be on another rank."""

    def __init__(self):
        super().__init__()
        count = EACH * dist.get_world_size()
        self.router = nn.Linear(WIDTH, count)
        experts = [nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH)) for _ in range(count)]
        self.experts = nn.ModuleList(experts[EACH * dist.get_rank() :][:EACH])
        self.dispatch, self.combine = Dispatch(), Combine()

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=self.router.out_features).view(-1, EACH)
        rows, came = self.dispatch(tokens[order], counts)
        owner = torch.arange(EACH, device=rows.device).repeat(len(came)).repeat_interleave(came.flatten())
        results = torch.zeros_like(rows)
        for i, each in enumerate(self.experts):
            index = (owner == i).nonzero().squeeze(1)
            results = results.index_copy(0, index, each(rows[index]))
        back = torch.zeros_like(tokens).index_copy(0, order, self.combine(results, counts, came))
        return (weight[:, None] * back).view_as(x)


def train(make_store):
    model = Transformer()
    for block in model.blocks:
        block.up, block.down = nn.Identity(), Mixture()
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = make_store(model)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, dist.get_rank())
        with store:
            loss = (model(x) - y).square().mean()
        loss.backward()
        for name, weight in model.named_parameters():
            if ".experts." not in name:  # an expert has seen the tokens of all ranks already
                dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(model.parameters()), store


if __name__ == "__main__":
    start()
    compare(train, lambda model: ActivationStore(model, POLICY, min_bytes="64KiB"))
