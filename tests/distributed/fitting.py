"""The bytes of a rank, predicted by a fit on that rank and counted in training. Each job raises where they differ."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from actstore import fit_step
from actstore.devices import cpu_memory
from tests.distributed.training import local

WIDTH, HEADS, WORDS = 128, 4, 1001  # an odd number: the first rank has one row more
TOLERANCE = 0.03


class Block(nn.Module):
    """Attention and an MLP, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        heads = [f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        x = x + self.proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class LargeUpdate(torch.optim.AdamW):
    """Optimizer that takes most memory in its update, when all gradients are there."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        torch.empty(64 << 20)
        super().step()


def make_step() -> tuple[Model, Callable[[], Tensor]]:
    model, ids = Model(), torch.zeros(8, 32, dtype=torch.long)
    return model, lambda: model(ids)


def check(split: Callable[[Model], None], *, fsdp: int = 1, tp: int = 1) -> None:
    """Compare weights, gradients, optimizer and the peak of the third step."""
    gc.collect()
    assert cpu_memory.count()
    before = cpu_memory.memory_allocated()
    model, step = make_step()
    split(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        cpu_memory.reset_peak()
        step().backward()
        gradients = sum(local(weight.grad).nbytes for weight in model.parameters() if weight.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    peak = (cpu_memory.max_memory_allocated() or 0) - (before or 0)
    states = [local(each) for state in optimizer.state.values() for each in state.values()]
    if dist.get_rank() == 0:  # the figures are those of the first rank
        row = fit_step(make_step, [], fsdp=fsdp, tp=tp).rows[0]
        assert abs(row.peak_bytes / peak - 1) < TOLERANCE, (peak, row)
        at_update = fit_step(make_step, [], make_optimizer=LargeUpdate, fsdp=fsdp, tp=tp).rows[0].at_peak
        assert at_update["weights"] == sum(local(weight).nbytes for weight in model.parameters())
        assert at_update["gradients"] == gradients
        assert at_update["optimizer"] == sum(each.nbytes for each in states)


def fsdp() -> None:
    check(shard, fsdp=dist.get_world_size())


def shard(model: Model) -> None:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def tensor_parallel() -> None:
    check(split, tp=dist.get_world_size())


def split(model: Model) -> None:
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan |= {name: RowwiseParallel() for name in ("proj", "down")}
    for block in model.blocks:
        parallelize_module(block, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
