"""Data parallel training in each process that torchrun starts."""

import sys
from pathlib import Path

import torch

# Some of its functions have the process group as a default argument. DistributedDataParallel imports it after
# `init_process_group`: these would keep the group, and its threads, until the interpreter ends under them and aborts.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(3):
        loss = model(torch.randn(512, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), sys.argv[1])


dist.init_process_group("gloo")
train()
dist.destroy_process_group()
if "actstore" not in sys.modules:  # a run keeps the model until the process ends
    threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    assert not any("gloo" in name for name in threads), f"these threads outlive the group: {threads}"
