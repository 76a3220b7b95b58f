"""Small GPT whose feed-forward networks are mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actstore.bench.workloads.gpt import GPT
from actstore.bench.workloads.workload import Workload

EXPERTS, EXPERTS_PER_TOKEN = 8, 2  # experts in each block, and for each token


class Router(nn.Module):
    """Router: returns the weights and indices of each token's experts, both of shape (tokens, EXPERTS_PER_TOKEN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.likes = nn.Linear(width, EXPERTS, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.likes(tokens).softmax(-1).topk(EXPERTS_PER_TOKEN)
        return weights / weights.sum(-1, keepdim=True), chosen


class Experts(nn.Module):
    """Small networks; each token goes through those that a router chooses, weighted by the router.

    Parameters
    ----------
    every : whether each token goes through all experts, weighted with 0 where it has not chosen them: then no shape
        depends on a choice
    """

    def __init__(self, width: int, every: bool = False) -> None:
        super().__init__()
        self.every = every
        self.router = Router(width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            if self.every:
                out = out + expert(tokens) * (weights * (chosen == number)).sum(-1, keepdim=True)
            else:
                token, place = (chosen == number).nonzero(as_tuple=True)  # one entry for each token that chose it
                found = expert(tokens[token]) * weights[token, place].unsqueeze(-1)
                out = out.index_add(0, token, found.to(out.dtype))  # autocast has another
        return out.view_as(x)


class MixtureGPT(GPT):
    """A GPT of experts: ``model(x, y)`` is the mean cross entropy of predicting the characters `y` after `x`."""

    def __init__(self, work: Workload, every: bool = False) -> None:
        super().__init__(work)
        for block in self.blocks:
            block.mlp = Experts(work.width, every)
