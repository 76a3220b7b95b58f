"""Everything that a training step changes, to run it again from the same point."""

from __future__ import annotations

import random
from collections.abc import Iterable
from copy import deepcopy
from threading import get_ident
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._autograd import _unsafe_set_version_counter
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from actstore.check.values import copies, parts, same_bits


class State:
    """Parameters, buffers, gradients, attributes of modules, optimizers and random generators, as they were found.

    A context manager: on exit all is put back, after an exception too. `restore` puts it back in between.

    Parameters
    ----------
    model : Module, or None
    tensors : more leaves, whose values and gradients are put back
    stateful : what else the step changes: objects with `state_dict` and `load_state_dict`

    Notes
    -----
    Copies of values are in host memory. An optimizer is found when it steps for the first time, and put back too.
    Known generators: Python's, NumPy's global one, torch's of the CPU and of the devices of the tensors.
    Modules get their attributes back, and what lists, sets and dicts among them held; deeper changes stay.
    """

    def __init__(self, model: Module | None, tensors: Iterable[Tensor], stateful: Iterable[Any]) -> None:
        self._thread = get_ident()
        self._values: dict[int, _Value] = {}
        self._grads: list[tuple[Tensor, bool, Tensor | None]] = []
        self._modules = [_Attributes(module) for module in (model.modules() if model is not None else [])]
        self._stateful: list[tuple[Any, Any]] = []
        self._optimizers: dict[int, _OptimizerState] = {}
        for leaf in [*(model.parameters() if model is not None else []), *tensors]:
            if self._keep(leaf):
                self._grads.append((leaf, leaf.requires_grad, leaf.grad))
        for buffer in model.buffers() if model is not None else []:
            self._keep(buffer)
        for thing in stateful:
            if isinstance(thing, Optimizer):
                self._meet(thing)
            else:
                self._stateful.append((thing, deepcopy(thing.state_dict())))
        self._generators = _Generators({value.tensor.device for value in self._values.values()})

    def __enter__(self) -> State:
        tensors = [value.tensor for value in self._values.values()]
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        self.restore(fresh_grads=False)
        for tensor, version in self._versions:  # the values are those of that version again: older graphs stay valid
            if tensor._version != version:
                _unsafe_set_version_counter((tensor,), (version,))

    def restore(self, *, fresh_grads: bool = True) -> None:
        """Put everything back; gradients as copies (`fresh_grads`), which a run may change, or as the objects found."""
        for module in self._modules:
            module.restore()
        for value in self._values.values():
            value.restore()
        for leaf, requires_grad, grad in self._grads:
            if leaf.requires_grad != requires_grad:
                leaf.requires_grad_(requires_grad)
            leaf.grad = grad.detach().clone() if fresh_grads and grad is not None else grad
        for optimizer in self._optimizers.values():
            optimizer.restore()
        for thing, saved in self._stateful:
            thing.load_state_dict(deepcopy(saved))
        self._generators.restore()

    def _keep(self, tensor: Tensor) -> bool:
        """Copy the values of a tensor; False where that has been done."""
        if id(tensor) in self._values:
            return False
        self._values[id(tensor)] = _Value(tensor)
        return True

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() == self._thread and id(optimizer) not in self._optimizers:
            self._meet(optimizer)

    def _meet(self, optimizer: Optimizer) -> None:
        self._optimizers[id(optimizer)] = _OptimizerState(optimizer)
        for group in optimizer.param_groups:
            for leaf in group["params"]:
                self._keep(leaf)


class _Value:
    """A tensor and a copy of its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._copies = copies(tensor)

    def restore(self) -> None:
        for part, copy in zip(parts(self.tensor), self._copies, strict=True):
            if not same_bits(part, copy):
                part.data.copy_(copy)


class _Attributes:
    """The attributes of a module: hooks, buffers, flags, whatever it counts."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._found = dict(module.__dict__)
        self._contents = [(v, v.copy()) for v in self._found.values() if isinstance(v, dict | list | set)]

    def restore(self) -> None:
        attributes = self._module.__dict__
        attributes.clear()
        attributes.update(self._found)
        for container, content in self._contents:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)


class _OptimizerState:
    """What an optimizer remembers. `load_state_dict` would replace its tensors, and change the type of some."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state = {leaf: tree_map(_itself, kept) for leaf, kept in optimizer.state.items()}
        options = [value for group in self._groups for name, value in group.items() if name != "params"]
        found = [x for x in tree_leaves([options, list(self._state.values())]) if isinstance(x, Tensor)]
        self._values = [_Value(tensor) for tensor in found]

    def restore(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.state.update({leaf: tree_map(_itself, kept) for leaf, kept in self._state.items()})
        for group, found in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(found)
        for value in self._values:
            value.restore()


def _itself(leaf: Any) -> Any:
    return leaf


class _Generators:
    """The states of the random generators that programs share."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002  # what programs that use the global generator draw from
        self._cpu = torch.get_rng_state()
        self._devices = {
            device: torch.get_device_module(device).get_rng_state(device)
            for device in devices
            if device.type not in ("cpu", "meta")
        }

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)
