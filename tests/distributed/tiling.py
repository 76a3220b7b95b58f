"""Modules and losses in tiles under DDP and FSDP2: gradients are those of the same ranks without tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from actstore import ActivationStore
from tests.distributed.training import local

WIDTH, WORDS, TOKENS, STEPS = 32, 101, 64, 2
RULES = "blocks.*.mlp : recompute(tiles=4); loss : recompute(tiles=4)"
INSIDE = f"{RULES}; blocks.* : recompute"
TOLERANCE = 1e-5  # of the norm: sums over slices are rounded in another way


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.mlp(F.scaled_dot_product_attention(y, y, y))


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.loss = Loss()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, ids)


def sharded(*, parts: bool) -> nn.Module:
    """Return the model under FSDP2: each block and the loss, or also each MLP, gathers its own weights."""
    model, mesh = Model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        for module in (block.mlp, block) if parts else (block,):
            fully_shard(module, mesh=mesh)
    for module in (model.loss, model) if parts else (model,):
        fully_shard(module, mesh=mesh)
    return model


def ddp() -> None:
    _compare(lambda: DistributedDataParallel(Model()))


def fsdp() -> None:
    _compare(lambda: sharded(parts=False))


def fsdp_of_parts() -> None:
    _compare(lambda: sharded(parts=True))


def _compare(make: Callable[[], nn.Module]) -> None:
    wanted = _gradients(make(), None)
    for rules in (RULES, INSIDE):
        found = _gradients(make(), rules)
        assert wanted.keys() == found.keys()
        for name, gradient in wanted.items():
            assert gradient.norm() > 0, name
            error = float((found[name] - gradient).norm() / gradient.norm())
            assert error <= TOLERANCE, (rules, name, error)


def _gradients(model: nn.Module, rules: str | None) -> dict[str, Tensor]:
    """Return the gradients of the last of some steps, each of which updates the weights."""
    store = ActivationStore(model, rules or "keep", min_bytes=0)
    calls: list[object] = []
    for name, module in model.named_modules():
        if name.endswith("loss.head"):
            module.register_forward_hook(lambda *given: calls.append(given[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        torch.manual_seed(10 * number + dist.get_rank())
        optimizer.zero_grad()
        with store:
            loss = model(torch.randint(WORDS, (2, TOKENS)))
        loss.backward()
        optimizer.step()
    assert (len(calls) > STEPS) == (rules is not None)
    assert "saw nothing" not in str(store.report().advice)
    store.close()
    return {name: local(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}
