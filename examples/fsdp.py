"""FSDP2: torchrun --nproc-per-node 2 examples/fsdp.py"""

import torch
import torch.distributed as dist
from common import DEVICE, STEPS, Transformer, batch, compare, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from actstore import ActivationStore, Window


def train(make_store):
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    model = Transformer().to(DEVICE)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = make_store(model)  # before fully_shard or after it
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
    compare(train, lambda model: ActivationStore(model, "@blocks : raw @ disk", tiers=[Window("2MiB")]))
