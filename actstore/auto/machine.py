"""The machine that measurements hold for, and the memory of its device."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actstore._version import __version__
from actstore.base.ledger import Ledger
from actstore.devices import Device
from actstore.errors import ActstoreError
from actstore.plan.profile import Memory
from actstore.rerun.optimizers import OptimizerHook, live_optimizers, serving

OOM_BUDGET_SHARE = 0.9  # of the bytes held when memory ran out


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


class AllocatorPeak:
    """The peak of the device's allocator, from the start of a step to that of its optimizer.

    On the host, tensors of the process that the first step finds do not count; on any other device all do.
    """

    def __init__(self, model: Module, ledger: Ledger) -> None:
        self._model, self._ledger = model, ledger
        self._device: Device | None = None  # of the running step; None where its allocator does not count
        self._is_open = False  # no optimizer has stepped after backward
        self._before = self._most = 0  # the peak at the start of the step, and since
        self._known: int | None = None  # of a measured step: see `_count`
        self._beyond: int | None = None  # bytes that the count has beyond the model's, at the first step
        self._hook = OptimizerHook(self._stepping, register_optimizer_step_pre_hook)

    def begin(self, device: Device, memory: Callable[[], Memory], *, measured: bool) -> None:
        """Start a step. The allocator's peak is reset only for a step that is to be measured."""
        counted = device.allocated(reset=measured)
        self._device, self._is_open, self._most = None if counted is None else device, True, 0
        self._before = 0 if counted is None or measured else counted[1]
        self._known = None if counted is None or not measured else self._count(device, counted[0], memory())

    def look(self) -> None:
        """Note the peak so far, in case the caller resets it."""
        if self._is_open and self._device is not None and (counted := self._device.allocated()) is not None:
            self._most = max(self._most, counted[1])

    def finish(self, memory: Callable[[], Memory]) -> int | None:
        """End the step. Return its bytes at the allocator's peak beside `Memory.lasting` and the peak of activations.

        None where the allocator does not count, or an earlier step held more and the peak was not reset.
        """
        self.look()
        device, self._device = self._device, None
        if device is None or self._most <= self._before or (counted := device.allocated()) is None:
            return None
        known = self._count(device, counted[0], memory()) if self._known is None else self._known
        return max(0, int(self._most - known - self._ledger.peak))

    def close(self) -> None:
        """End the counts."""
        self._device = None
        self._hook.close()

    def _count(self, device: Device, now: int, memory: Memory) -> int:
        """Return what the allocator would count without activations, with all that lasts, and all gradients there."""
        grads = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        missing = memory.gradients - sum(grad.nbytes for grad in grads if grad.layout is torch.strided)
        count = now + missing - self._ledger.held
        if self._beyond is None:
            if memory.optimizer is None:  # it may have states of an earlier run
                memory = memory_of(self._model, serving(self._model, live_optimizers()))
            self._beyond = count - memory.lasting if device.on_host else 0
        return min(count, memory.lasting + self._beyond)  # the rest is of others

    def _stepping(self, optimizer: Optimizer) -> None:
        if self._device is not None and self._is_open and serving(self._model, [optimizer]):
            self.look()
            self._is_open = self._ledger.held > 0  # else backward is over


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
