"""DistributedDataParallel: torchrun --nproc-per-node 2 examples/ddp.py"""

import torch
import torch.distributed as dist
from common import DEVICE, STEPS, Transformer, batch, compare, start
from torch.nn.parallel import DistributedDataParallel

from actstore import ActivationStore


def train(make_store):
    model = DistributedDataParallel(Transformer().to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = make_store(model)  # of this rank; names are those of the Transformer
    losses = []
    for step in range(STEPS):
        x, y = batch(step, dist.get_rank())
        with store:
            loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(model.parameters()), store


if __name__ == "__main__":
    start()
    compare(train, lambda model: ActivationStore(model, "@blocks : recompute"))
