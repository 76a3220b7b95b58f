"""Tensor and sequence parallelism: torchrun --nproc-per-node 2 examples/tensor_parallel.py"""

import torch
from common import DEVICE, STEPS, Transformer, batch, compare, start
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from actstore import ActivationStore


def split(model):
    """Split attention heads and MLPs over the ranks; between them each rank has a part of the tokens."""
    mesh = init_device_mesh(DEVICE.type, (get_world_size(),))
    columns, rows = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    plan = dict.fromkeys(("q", "k", "v", "up"), columns) | dict.fromkeys(("proj", "down"), rows)
    plan |= {name: SequenceParallel() for name in ("norm1", "norm2")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    first = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
    last = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(model, mesh, {"blocks.0": first, "head": last})


def train(make_store):
    model = split(Transformer().to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = make_store(model)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)  # all ranks work on the same data
        with store:
            loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(model.parameters()), store


if __name__ == "__main__":
    start()
    compare(train, lambda model: ActivationStore(model, "@blocks : recompute", min_bytes="64KiB"))
