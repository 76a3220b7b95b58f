"""Memory of the device beside activations."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from actstore.plan.profile import Memory


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
    )
