"""Parts that the examples share: a small Transformer, its data, and the proof that a store changes nothing."""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

STEPS, WIDTH, HEADS, TOKENS, BATCH = 20, 128, 4, 64, 8
DEVICE = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
)

log = logging.getLogger("example")

Store = AbstractContextManager[Any]
Result = tuple[list[Tensor], list[Tensor], Store]  # losses, weights after the last step, and the store
MakeStore = Callable[[nn.Module], Store]
Train = Callable[[MakeStore], Result]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = [f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        x = x + self.proj(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step; each `part` of the data has its own."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator).to(DEVICE)
    return x, x.cumsum(1).tanh()


def start() -> None:
    """Join the processes that torchrun started, where it did."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        torch.use_deterministic_algorithms(True)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")


def compare(train: Train, make_store: MakeStore, plain: Train | None = None) -> None:
    """Train without a store and with one, from the same seed; fail where a bit differs or nothing is saved.

    `plain` trains without a store; `train` does where it is None.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0

    def run(train: Train, make: MakeStore) -> Result:
        torch.manual_seed(0)
        losses, weights, store = train(make)
        return losses, [local(weight).detach().clone() for weight in weights], store

    losses, weights, _ = run(plain or train, lambda _: nullcontext())
    ours, stored, store = run(train, make_store)
    report = store.report()
    if not all(map(torch.equal, [*losses, *weights], [*ours, *stored])):
        raise SystemExit(f"rank {rank}: losses or weights differ from those of plain training")
    if not report.held_bytes < report.saved_bytes:
        raise SystemExit(f"rank {rank}: nothing was saved\n{report}")
    if rank == 0:
        log.info("%s", report)
        log.info("%d steps: all losses and %d weights equal bit for bit to plain training", STEPS, len(weights))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def local(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
