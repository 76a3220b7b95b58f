"""Everything that a training step changes, to run it again from the same point."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
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

from actstore.check.values import components, copies, parts, same_bits
from actstore.generators import owned


class State:
    """Parameters, buffers, gradients, attributes of modules, optimizers and random generators, as they were found.

    A context manager: on exit all is put back, after an exception too. `restore` puts it back in between. Where
    something cannot be put back the rest is, and the error raised; on exit it is a note to that of the step, if any.

    Parameters
    ----------
    model : Module, or None
    tensors : more leaves, whose values and gradients are put back
    stateful : what else the step changes: objects with `state_dict` and `load_state_dict`

    Notes
    -----
    Copies of values are in host memory. An optimizer is found when it steps for the first time, and put back too, but
    by then backward has added to the gradients: those of its parameters outside of the model are put back only where
    it is among `stateful`, or they among `tensors`.
    Known generators: Python's, NumPy's global one, torch's of the CPU and of the devices of the tensors, and those that
    are attributes of modules.
    Modules get their attributes back, and what lists, sets and dicts among them held; deeper changes stay.
    """

    def __init__(self, model: Module | None, tensors: Iterable[Tensor], stateful: Iterable[Any]) -> None:
        self._thread = get_ident()
        self._values: dict[int, _Value] = {}
        self._grads: dict[int, _Gradient] = {}
        modules = list(model.modules()) if model is not None else []
        self._modules = [_Attributes(module) for module in modules]
        self._contents = [_Content(x) for m in modules for x in vars(m).values() if isinstance(x, dict | list | set)]
        self._stateful: list[tuple[Any, Any]] = []
        self._optimizers: dict[int, _OptimizerState] = {}
        for leaf in [*(model.parameters() if model is not None else []), *tensors]:
            self._keep_leaf(leaf)
        for buffer in model.buffers() if model is not None else []:
            self._keep(buffer)
        for thing in stateful:
            if isinstance(thing, Optimizer):
                self._meet(thing)
                for leaf in (leaf for group in thing.param_groups for leaf in group["params"]):
                    self._keep_leaf(leaf)
            else:
                self._stateful.append((thing, deepcopy(thing.state_dict())))
        self._generators = _Generators({value.tensor.device for value in self._values.values()}, modules)

    def __enter__(self) -> State:
        tensors = [value.tensor for value in self._values.values()]
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        try:
            self.restore(fresh_grads=False)
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Afterwards not all could be put back as it was: {type(failure).__name__}: {failure}")
        finally:
            for (
                tensor,
                version,
            ) in self._versions:  # the values are those of that version again: older graphs stay valid
                if tensor._version != version:
                    _unsafe_set_version_counter((tensor,), (version,))

    def restore(self, *, fresh_grads: bool = True) -> None:
        """Put everything back; gradients as copies (`fresh_grads`), which a run may change, or as the objects found."""
        with ExitStack() as stack:  # what is pushed first is called last, and whatever the others raise
            for undo in reversed(list(self._undoings(fresh_grads))):
                stack.callback(undo)

    def _undoings(self, fresh_grads: bool) -> Iterator[Callable[[], object]]:
        kept = (self._modules, self._contents, self._values.values())
        yield from (thing.restore for things in kept for thing in things)
        yield from (partial(gradient.restore, fresh=fresh_grads) for gradient in self._grads.values())
        yield from (optimizer.restore for optimizer in self._optimizers.values())
        yield from (partial(_load, thing, found) for thing, found in self._stateful)
        yield from self._generators.undoings()

    def _keep(self, tensor: Tensor) -> None:
        if id(tensor) not in self._values:
            self._values[id(tensor)] = _Value(tensor)

    def _keep_leaf(self, leaf: Tensor) -> None:
        self._keep(leaf)
        self._grads.setdefault(id(leaf), _Gradient(leaf))

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
        self._sparse = tensor.detach() if components(tensor) else None  # keeps its indices and values
        self._copies = [copy for part in self._parts() for copy in copies(part)]

    def restore(self) -> None:
        if self._sparse is not None:
            self.tensor.data = self._sparse.detach()
        for part, copy in zip(self._parts(), self._copies, strict=True):
            if not same_bits(part, copy):
                part.data.copy_(copy)

    def _parts(self) -> list[Tensor]:
        return parts(self.tensor) if self._sparse is None else components(self._sparse)


class _Gradient:
    """A leaf, whether it requires a gradient, and the one that it has."""

    def __init__(self, leaf: Tensor) -> None:
        self._leaf, self._requires_grad, self._grad = leaf, leaf.requires_grad, leaf.grad

    def restore(self, *, fresh: bool) -> None:
        leaf, grad = self._leaf, self._grad
        if leaf.requires_grad != self._requires_grad:
            leaf.requires_grad_(self._requires_grad)
        leaf.grad = grad.detach().clone() if fresh and grad is not None else grad


class _Attributes:
    """The attributes of a module: hooks, buffers, flags, whatever it counts."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._found = dict(module.__dict__)

    def restore(self) -> None:
        attributes = self._module.__dict__
        attributes.clear()
        attributes.update(self._found)


class _Content:
    """What a container holds. One that holds it still is not written to: its class may not allow that."""

    def __init__(self, container: Any) -> None:
        self._container = container
        self._found = self._read()

    def _read(self) -> list[Any]:
        return list(self._container.items() if isinstance(self._container, dict) else self._container)

    def restore(self) -> None:
        container, found = self._container, self._found
        if list(map(_identity, self._read())) == list(map(_identity, found)):
            return
        container.clear()
        if isinstance(container, list):
            container.extend(found)
        else:
            container.update(dict(found) if isinstance(container, dict) else found)


def _identity(held: Any) -> Any:
    """Of an element, or of a key and its value: their own comparison may not be a truth value."""
    return tuple(map(id, held)) if type(held) is tuple else id(held)


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


def _load(thing: Any, found: Any) -> None:
    thing.load_state_dict(deepcopy(found))


def _itself(leaf: Any) -> Any:
    return leaf


class _Generators:
    """The states of the random generators that programs share, and of those that modules own."""

    def __init__(self, devices: set[torch.device], modules: Iterable[Module]) -> None:
        self._owned = [(source, source.read()) for source in owned(modules)]
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002  # what programs that use the global generator draw from
        self._cpu = torch.get_rng_state()
        self._devices = {
            device: torch.get_device_module(device).get_rng_state(device)
            for device in devices
            if device.type not in ("cpu", "meta")
        }

    def undoings(self) -> Iterator[Callable[[], object]]:
        yield from (partial(source.set, state) for source, state in self._owned)
        yield partial(random.setstate, self._python)
        yield partial(np.random.set_state, self._numpy)
        yield partial(torch.set_rng_state, self._cpu)
        for device, state in self._devices.items():
            yield partial(torch.get_device_module(device).set_rng_state, state, device)
