"""The jobs of context parallelism: ranks have parts of the tokens, and exchange them for heads around attention."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from tests.distributed.counting import check_counts
from tests.distributed.training import (
    HEADS,
    WIDTH,
    Block,
    Context,
    Model,
    Rank,
    batch,
    check_acted,
    check_equal,
    check_lossy,
    loss_of,
    saved_nbytes,
)

COLLECTIVES = 4  # of a block in forward: queries, keys, values, and what they find
DEPTH = 2


def exchange(x: Tensor, give: int, get: int) -> Tensor:
    """Give each rank its part of dimension `give`, and get all of dimension `get`."""
    each = [1] * dist.get_world_size()
    parts = torch.stack(x.chunk(len(each), give))
    return torch.cat(list(all_to_all_single_autograd(parts, each, each, dist.group.WORLD)), get)


class Attend(nn.Module):
    def forward(self, *parts: Tensor) -> Tensor:
        heads = [exchange(part, 2, 1).transpose(1, 2) for part in parts]
        return exchange(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2), 1, 2)


class LongBlock(Block):
    def __init__(self) -> None:
        super().__init__(0.0)
        self.attend = Attend()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        parts = [f(y).unflatten(-1, (-1, WIDTH // HEADS)) for f in (self.q, self.k, self.v)]
        x = x + self.proj(self.attend(*parts).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build() -> Rank:
    model = Model()
    model.blocks = nn.ModuleList(LongBlock() for _ in range(DEPTH))

    def step(number: int, context: Context) -> Tensor:
        with context():
            loss = loss_of(model(batch(number).chunk(dist.get_world_size(), 1)[dist.get_rank()]))
        loss.backward()
        for weight in model.parameters():
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
        return loss

    return Rank(model, step)


def except_attention(wait: str) -> str:
    return f"blocks.*.attend : {wait}; blocks.* : recompute"


def except_collectives(wait: str) -> str:
    return f"blocks.*/@collective : {wait}; blocks.* : recompute"


EXCEPTIONS = tuple(
    rule(wait) for rule in (except_attention, except_collectives) for wait in ("keep", "raw @ host", "raw @ disk")
)


def parts_of_tokens_are_exact() -> None:
    check_equal(build, EXCEPTIONS)
    check_acted(check_equal(build), saved_nbytes(build))
    check_lossy(build)


def parts_of_tokens_are_exchanged_as_often() -> None:
    once = dict.fromkeys(("keep", "raw @ disk", *EXCEPTIONS), 0)
    check_counts(build, once | {"blocks.* : recompute": DEPTH * COLLECTIVES})


def parts_of_tokens_are_those_of_one_process() -> None:
    """The gradients of all parts are those of the same model over all tokens."""
    torch.manual_seed(0)
    rank, whole = build(), Model()
    whole.load_state_dict(rank.model.state_dict())
    rank.step(0, nullcontext)
    loss_of(whole(batch(0))).backward()
    wanted = {name: weight.grad for name, weight in whole.named_parameters()}
    for name, weight in rank.model.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad / dist.get_world_size(), wanted[name])
