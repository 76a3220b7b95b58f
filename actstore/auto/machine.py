"""The machine that measurements hold for, and the memory of its device."""

from __future__ import annotations

import os
import platform

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from actstore._version import __version__
from actstore.errors import ActstoreError
from actstore.plan.profile import Memory


def machine_of(device: torch.device) -> dict[str, str]:
    """Return the properties of the machine that step times depend on."""
    name = platform.processor() or platform.machine()
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {
        "device": name,
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else str(os.cpu_count()),
        "torch": ".".join(torch.__version__.split("+")[0].split(".")[:2]),
        "actstore": __version__,
    }


def memory_of(model: Module, optimizers: list[Optimizer]) -> Memory:
    """Return the bytes of parameters, gradients, optimizer states and buffers."""
    parameters = list(model.parameters())
    mine = {id(parameter) for parameter in parameters}
    states = [
        value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        if id(parameter) in mine
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return Memory(
        sum(parameter.nbytes for parameter in parameters),
        sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        sum(state.nbytes for state in states) if optimizers else None,
        sum(buffer.nbytes for buffer in model.buffers()),
        max((_updating(optimizer) for optimizer in optimizers), default=0),
    )


def _updating(optimizer: Optimizer) -> int:
    """Return about the bytes that a step of the optimizer needs beside its states.

    PyTorch's implementation for one tensor after the other needs those of the largest, that for lists of tensors
    (`foreach`, the default on CUDA) those of all of a group, a fused one none.
    """
    most = 0
    for group in optimizer.param_groups:
        sizes = [parameter.nbytes for parameter in group["params"] if parameter.requires_grad]
        foreach = group.get("foreach")
        if foreach is None:
            foreach = all(parameter.is_cuda for parameter in group["params"])
        if not group.get("fused"):
            most = max(most, sum(sizes) if foreach else max(sizes, default=0))
    return most


def alloc_retries(device: torch.device) -> int:
    """Return how often the device's allocator had to return cached memory to the system to find some."""
    # `memory_stats` would flatten and sort a hundred figures, and this reads one
    stats = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else {}
    return int(stats.get("num_alloc_retries", 0))


def ran_out(error: BaseException) -> bool:
    """Return whether memory ran out. False for an ActstoreError, which has its own advice."""
    if isinstance(error, ActstoreError):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
