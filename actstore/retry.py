"""What must be as before, so that a step that ran out of memory can be run once more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase

from actstore.generators import Generators


class Attempt:
    """The state of a model and of the random generators before a step.

    Put back are the generators (torch's, Python's, NumPy's, those of modules), the running statistics of
    normalisations, and gradients that were not there before. Whatever else the step has changed by then (parameters,
    gradients that were there, other buffers) is found by its version, and then the step cannot be run again.
    """

    def __init__(self, model: Module) -> None:
        modules = list(model.modules())
        self._parameters = list(model.parameters())
        self._generators = Generators(modules)
        device = next((p.device for p in self._parameters if p.device.type != "cpu"), None)
        self._states: list[tuple[Any, Tensor]] = [(torch.default_generator, torch.get_rng_state())]
        if device is not None and device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
            self._states.append((generator, generator.get_state()))
        self._versions: list[tuple[Tensor, int]] = [(tensor, tensor._version) for tensor in self._parameters]
        self._grads = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in self._parameters]
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
        """Put back what can be; the reason where the step cannot be run again, else empty."""
        if any(tensor._version != version for tensor, version in self._versions):
            return "it has changed parameters or buffers of the model"
        if any(grad is not None and (p.grad is not grad or grad._version != v) for p, grad, v in self._grads):
            return "it has added to gradients that were there before"
        for parameter, grad, _ in self._grads:
            if grad is None:
                parameter.grad = None
        with torch.no_grad():
            for buffer, before in self._norms:
                buffer.copy_(before)
        for generator, state in self._states:
            generator.set_state(state)
        self._generators.rewind()
        return ""
