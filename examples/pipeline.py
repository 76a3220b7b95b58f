"""A pipeline with the schedule 1F1B: torchrun --nproc-per-node 2 examples/pipeline.py"""

import torch
import torch.distributed as dist
from common import DEVICE, STEPS, Transformer, batch, compare, start
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from actstore import ActivationStore


def train(make_store):
    rank, count = dist.get_rank(), dist.get_world_size()
    whole = Transformer(depth=2 * count)
    mine = nn.Sequential(*whole.blocks[2 * rank : 2 * rank + 2]).to(DEVICE)
    stage = PipelineStage(mine, rank, count, DEVICE)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda output, y: (output - y).square().mean())
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)
    store = make_store(mine)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        parts = []
        with store:  # around the whole schedule: forward and backward of all micro-batches
            schedule.step(*([x] if rank == 0 else []), target=y if rank == count - 1 else None, losses=parts)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach() for loss in parts]
    return losses, list(mine.parameters()), store


if __name__ == "__main__":
    start()
    compare(train, lambda model: ActivationStore(model, "recompute(raw @ disk)", min_bytes="64KiB"))
