"""LoRA fine-tuning: low-rank adapters at every linear layer of the blocks of a Llama whose own weights are frozen."""

from __future__ import annotations

import math

from torch import Tensor, nn

from actstore.bench.workloads.job import PARTS, Job, Kind
from actstore.bench.workloads.llama import Llama, check
from actstore.bench.workloads.text import Batches
from actstore.bench.workloads.workload import Workload

RANK = 8
SCALE = 2.0


class Adapted(nn.Module):
    """A frozen linear layer and its adapter: ``base(x) + SCALE * up(down(x))``, with `up` initialized to zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + SCALE * self.up(self.down(x))
        return out


def adapt(module: nn.Module) -> None:
    """Put an adapter at every linear layer inside `module`."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, Adapted(child))
        else:
            adapt(child)


def make(work: Workload) -> Job:
    model = Llama(work)
    model.requires_grad_(False)
    adapt(model.blocks)
    model.head.requires_grad_(True)  # a new head, as for a new vocabulary
    model.to(work.device)
    return Job(work, model, model.blocks, Batches(work))


KIND = Kind(
    title="a LoRA fine-tune of a frozen Llama on English text",
    default=Workload("lora", layers=6, width=256, heads=8, context=256, batch=6),
    uses=("layers", "width", "heads", "context", "batch"),
    make=make,
    check=check,
    policies=PARTS,
)
