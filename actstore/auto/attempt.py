"""State to restore before a step that ran out of memory can run again."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from actstore.model.generators import GeneratorStates


class Attempt:
    """The state of a model and of the random generators before a step.

    `undo` restores the generators (torch's, Python's, NumPy's, those of modules) and the running statistics of
    normalizations, and drops gradients that are new. Version counters show any other change of the model (parameters,
    earlier gradients, other buffers) or of the step's tensor arguments; after one the step cannot run again. Gradients
    that have been freed, as after `optimizer.zero_grad()`, stay dropped. `undo` does not see what a step takes from an
    iterator or counts in attributes.

    Parameters
    ----------
    given : the arguments of the step
    """

    def __init__(self, model: Module, given: Any = ()) -> None:
        modules = list(model.modules())
        own = (parameter for module in modules for parameter in module._parameters.values())
        self._parameters = list(dict.fromkeys(parameter for parameter in own if parameter is not None))
        devices = {parameter.device for parameter in self._parameters}
        self._generators = GeneratorStates(modules, [each for each in devices if each.type not in ("cpu", "meta")])
        tensors = [*self._parameters, *(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))]
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        grads = [(p, p.grad) for p in self._parameters]
        self._grads = [(p, ref(grad), grad._version) for p, grad in grads if grad is not None]  # holds no memory
        self._without = [p for p, grad in grads if grad is None]
        self._buffers = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
        self._norms: list[tuple[Tensor, Tensor]] = []
        for module in modules:
            for buffer in module._buffers.values():
                if buffer is None or buffer.is_inference():
                    continue
                if isinstance(module, _NormBase):
                    self._norms.append((buffer, buffer.clone()))
                else:
                    self._versions.append((buffer, buffer._version))

    def undo(self) -> str:
        """Restore the state and return an empty text, or the reason why the step cannot run again."""
        if any(tensor._version != version for tensor, version in self._versions):
            return "it has changed parameters or buffers of the model, or its arguments"
        if any(module._buffers.get(name) is not buffer for module, name, buffer in self._buffers):
            return "it has put other buffers into the model"
        dropped = []
        for parameter, weak, version in self._grads:
            grad = weak()
            if grad is None:
                dropped.append(parameter)
            elif parameter.grad is not grad or grad._version != version:
                return "it has changed gradients that were there before"
        for parameter in (*self._without, *dropped):
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in self._norms:
                buffer.copy_(before)
        self._generators.rewind()
        return ""
