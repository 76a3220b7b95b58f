"""FSDP2 and tensor parallelism on a 2x2 mesh: torchrun --nproc-per-node 4 examples/sharded_tensor_parallel.py"""

import torch
import torch.distributed as dist
from common import DEVICE, STEPS, batch, compare, start
from llama import Llama, apply_fsdp, apply_tp
from torch.distributed.device_mesh import init_device_mesh

from actstore import ActivationStore

# Layers run again in backward, without their collectives: what these make waits on the device.
POLICY = "@blocks/@collective : keep; @blocks : recompute"


def train(make_store):
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    model = Llama().to(DEVICE)
    apply_tp(model, mesh["tensor"])
    store = make_store(model)
    apply_fsdp(model, mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, mesh.get_local_rank("data"))  # the ranks of a tensor group work on the same data
        with store:
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, list(model.parameters()), store


if __name__ == "__main__":
    start()
    compare(train, lambda model: ActivationStore(model, POLICY))
