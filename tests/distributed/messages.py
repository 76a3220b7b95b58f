"""The jobs of blocks that send messages to single ranks in forward, under a rule for collectives: each is sent once."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.distributed_c10d import _coalescing_manager

from actstore import ActivationStore
from actstore.errors import StateError
from tests.distributed.collectives import once
from tests.distributed.counting import check_counts
from tests.distributed.training import WIDTH, Rank, batch, check_equal, check_lossy, micro_batches

DEPTH = 2


class OneWay(Function):
    """Ranks with an even number send, the next ones receive. Gradients go back."""

    COUNT = 1

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rank, come = dist.get_rank(), torch.zeros_like(x)
        dist.recv(come, rank - 1) if rank % 2 else dist.send(x.contiguous(), rank + 1)
        return x + come

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rank, come = dist.get_rank(), torch.zeros_like(grad)
        dist.send(grad.contiguous(), rank - 1) if rank % 2 else dist.recv(come, rank + 1)
        return grad + come


def pass_on(x: Tensor, come: Tensor, step: int) -> list[Any]:
    """Begin to send to the rank that is so many steps ahead, and to receive from the one as many behind."""
    rank, count = dist.get_rank(), dist.get_world_size()
    ahead, behind = (rank + step) % count, (rank - step) % count
    return list(dist.batch_isend_irecv([dist.P2POp(dist.isend, x, ahead), dist.P2POp(dist.irecv, come, behind)]))


class Ring(Function):
    """Two rounds in one buffer, of which a view is taken before the message has come, and which is written to."""

    COUNT = 4

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sent, come, total = x.contiguous(), torch.zeros_like(x), x.clone()
        for _ in range(2):
            works = pass_on(sent, come, 1)
            rows = come.view(-1)
            for work in works:
                work.wait()
            total += rows.view_as(x)
            sent = come.mul_(0.5).clone()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total, sent = grad, grad.contiguous()
        for _ in range(2):
            come = torch.zeros_like(grad)
            for work in pass_on(sent, come, -1):
                work.wait()
            total, sent = total + come, 0.5 * come
        return total


class Unread(Function):
    """A message that autograd saves, and that no operator reads."""

    COUNT = 2

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        come = torch.zeros_like(x)
        for work in pass_on(x.contiguous(), come, 1):
            work.wait()
        ctx.save_for_backward(come)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (come,) = ctx.saved_tensors
        return grad * (1 + come)


class Together(Ring):
    """Messages in one call, as NCCL makes them of a batch: they run again."""

    COUNT = 2

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        come = torch.zeros_like(x)
        with _coalescing_manager(async_ops=True):
            works = pass_on(x.contiguous(), come, 1)
        for work in works:
            work.wait()
        return x + come


WAYS = (OneWay, Ring, Unread)


class Block(nn.Module):
    """On the ranks that send one way, nothing that backward reads comes after the message."""

    def __init__(self, way: type[Any]) -> None:
        super().__init__()
        self.first, self.second, self.way = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), way

    def forward(self, x: Tensor) -> Tensor:
        y = self.way.apply(torch.sigmoid(self.first(x)))
        return x + (y if self.way is OneWay and dist.get_rank() % 2 == 0 else F.gelu(self.second(y)))


def build(way: type[Any]) -> Rank:
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(*(Block(way) for _ in range(DEPTH)))))
    return Rank(model, micro_batches(model, dist.get_rank()))


def messages_are_sent_once() -> None:
    policies = tuple(map(once, ("keep", "raw @ disk", "int8")))
    for way in WAYS:
        check_equal(partial(build, way), policies)
        check_counts(partial(build, way), dict.fromkeys(policies, 0))
    check_lossy(partial(build, Ring), once("keep", "recompute(int8)"))


def messages_run_again_without_the_rule() -> None:
    """In a batch of NCCL with the rule, too."""
    check_counts(partial(build, Ring), {"blocks.* : recompute": DEPTH * Ring.COUNT})
    check_counts(partial(build, Together), {once(): DEPTH * Together.COUNT})
    check_equal(partial(build, Together), (once(),))


def a_rank_may_recompute_alone() -> None:
    policies = once(), "keep"
    for way in WAYS:
        check_equal(partial(build, way), policies[:: 1 if dist.get_rank() else -1])


class Waits(nn.Module):
    """Receives from the rank that it names, or from any, and leaves its caller to wait."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.inner, self.works, self.named = nn.Linear(WIDTH, WIDTH), [], named

    def forward(self, x: Tensor) -> Tensor:
        rank, count, come = dist.get_rank(), dist.get_world_size(), torch.zeros_like(x)
        self.works.append(dist.isend(x, (rank + 1) % count))
        if self.named:
            self.works.append(dist.irecv(come, (rank - 1) % count))
        else:
            dist.recv(come)
        return torch.tanh(self.inner(x))


def what_cannot_come_back_is_refused() -> None:
    rules = {
        True: r"blocks\.0: must wait inside of its forward .*Call wait there",
        False: r"blocks\.0: must name the rank .*Call recv with src",
    }
    for named, rule in rules.items():
        model = nn.Sequential(OrderedDict(blocks=nn.Sequential(Waits(named=named))))
        store = ActivationStore(model, once(), min_bytes=0)
        with pytest.raises(StateError, match=rule) as refused, store:
            model(batch(0))
        assert refused.value.module == "blocks.0"
        for work in model.blocks[0].works:
            work.wait()
