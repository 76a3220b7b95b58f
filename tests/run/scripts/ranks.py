"""Data parallel training in each process that torchrun starts."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
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
dist.destroy_process_group()
