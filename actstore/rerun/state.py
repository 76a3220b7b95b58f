"""The state that a training step changes, recorded so that the step can run again from the same point."""

from __future__ import annotations

import gc
import random
from collections import deque
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
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actstore.errors import ConfigError
from actstore.model.generators import owned
from actstore.rerun.optimizers import OptimizerState, leaves_of, live_optimizers
from actstore.rerun.values import Gradient, Value

_CONTAINERS = (dict, list, set, deque)


class Attributes:
    """The attributes of a module: hooks, buffers, flags, counters."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._found = dict(module.__dict__)

    def restore(self) -> None:
        attributes = self._module.__dict__
        attributes.clear()
        attributes.update(self._found)


class Content:
    """The elements of a container. `restore` writes only where they have changed: a class may refuse writes."""

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
        if isinstance(container, list | deque):
            container.extend(found)
        else:
            container.update(dict(found) if isinstance(container, dict) else found)


def _identity(held: Any) -> Any:
    """Return the ids of an element, or of a key and its value, as their ``==`` may not return a bool."""
    return tuple(map(id, held)) if type(held) is tuple else id(held)


def contents(modules: Iterable[Module]) -> tuple[list[Content], list[Tensor]]:
    """Return the lists, sets, dicts and deques among and inside the attributes of modules, and the plain tensors there.

    Each is returned once. Tensors that a graph computed are left out: a step does not write to them.
    """
    containers: list[Content] = []
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    todo = [value for module in modules for value in vars(module).values()]
    while todo:
        value = todo.pop()
        if isinstance(value, (*_CONTAINERS, tuple)):
            if id(value) not in seen:
                seen.add(id(value))
                if not isinstance(value, tuple):
                    containers.append(Content(value))
                todo.extend(value.values() if isinstance(value, dict) else value)
        elif type(value) is Tensor and value.is_leaf:
            tensors[id(value)] = value
    return containers, list(tensors.values())


class ModelState:
    """Parameters, buffers, gradients, module attributes, optimizers and random generators, recorded at construction.

    A context manager: on exit it restores everything, also after an exception. `restore` does so in between. Where one
    part cannot be restored, the rest is, and the error is raised; on exit it becomes a note on the step's own error.

    Parameters
    ----------
    model : Module, or None
    tensors : more leaves, whose values and gradients to restore
    stateful : other objects that the step changes, with `state_dict` and `load_state_dict`

    Notes
    -----
    Copies of values are in host memory. An optimizer is restored from its first step on. By then backward has added to
    the gradients; so those of all optimizers that exist at construction are recorded at once. Those that `gc.freeze`
    has hidden are refused where the model does not have their parameters.
    Known generators: Python's, NumPy's global one, torch's of the CPU and of the devices of the tensors, and those that
    are attributes of modules.
    Modules get back their attributes, the elements of lists, sets, dicts and deques among and inside these, and the
    values of plain tensors there. The contents of other objects are not restored.
    """

    def __init__(self, model: Module | None, tensors: Iterable[Tensor], stateful: Iterable[Any]) -> None:
        self._thread = get_ident()
        self._values: dict[int, Value] = {}
        self._grads: dict[int, Gradient] = {}
        modules = list(model.modules()) if model is not None else []
        self._modules = [Attributes(module) for module in modules]
        self._contents, held = contents(modules)
        self._stateful: list[tuple[Any, Any]] = []
        self._optimizers: dict[int, OptimizerState] = {}
        for leaf in [*(model.parameters() if model is not None else []), *tensors]:
            self._keep_leaf(leaf)
        for buffer in model.buffers() if model is not None else []:
            self._keep(buffer)
        for tensor in held:
            self._keep_leaf(tensor)
        for thing in stateful:
            if isinstance(thing, Optimizer):
                self._meet(thing)
                for leaf in leaves_of(thing):
                    self._keep_leaf(leaf)
            else:
                self._stateful.append((thing, deepcopy(thing.state_dict())))
        self._outside = [(optimizer, list(self._unknown(optimizer))) for optimizer in live_optimizers()]
        self._has_frozen = gc.get_freeze_count() > 0
        self._generators = _SharedGenerators({value.tensor.device for value in self._values.values()}, modules)

    def __enter__(self) -> ModelState:
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
            for value in self._values.values():  # the values of that version are back: older graphs stay valid
                if value.version is not None and value.tensor._version != value.version:
                    _unsafe_set_version_counter((value.tensor,), (value.version,))

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers that were given, and those that have stepped."""
        return [each.optimizer for each in self._optimizers.values()]

    def restore(self, *, fresh_grads: bool = True) -> None:
        """Restore everything; gradients as copies (`fresh_grads`), which a run may change, or as the objects found."""
        with ExitStack() as stack:  # calls all in reverse order, also after one raises
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
            self._values[id(tensor)] = Value(tensor)

    def _keep_leaf(self, leaf: Tensor) -> None:
        self._keep(leaf)
        self._grads.setdefault(id(leaf), Gradient(leaf))

    def _unknown(self, optimizer: Optimizer) -> Iterator[tuple[Gradient, Value | None]]:
        """Yield the gradients of an optimizer's parameters that are not recorded so far."""
        for leaf in leaves_of(optimizer):
            if id(leaf) not in self._grads:
                yield Gradient(leaf), None if leaf.grad is None else Value(leaf.grad)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() == self._thread and id(optimizer) not in self._optimizers:
            if self._has_frozen and any(self._unknown(optimizer)):
                self._refuse_frozen(optimizer)
            self._meet(optimizer)
            for gradient, value in (each for other, pairs in self._outside if other is optimizer for each in pairs):
                self._grads.setdefault(id(gradient.leaf), gradient)
                if value is not None:
                    self._values.setdefault(id(value.tensor), value)

    def _refuse_frozen(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that `live_optimizers` did not see, whose parameters the model does not have.

        Raises
        ------
        ConfigError : `gc.freeze` has hidden it
        """
        seen = [other for other, _ in self._outside] + live_optimizers()  # the latter for those that the step makes
        if not any(other is optimizer for other in seen):
            raise ConfigError(
                f"{type(optimizer).__name__}: a step that is to be put back must not train, by an optimizer that "
                "gc.freeze() has hidden, parameters that the model does not have: their gradients from before are "
                "unknown. Give the optimizer by stateful=[optimizer], or call gc.unfreeze() first."
            )

    def _meet(self, optimizer: Optimizer) -> None:
        self._optimizers[id(optimizer)] = OptimizerState(optimizer)
        for leaf in leaves_of(optimizer):
            self._keep(leaf)


def _load(thing: Any, found: Any) -> None:
    thing.load_state_dict(deepcopy(found))


class _SharedGenerators:
    """The states of the process's global random generators, and of those that modules own."""

    def __init__(self, devices: set[torch.device], modules: Iterable[Module]) -> None:
        self._owned = [(source, source.read()) for source in owned(modules)]
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002  # the generator that np.random.rand and its like draw from
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


def require_initialized(model: Module | None) -> None:
    """Refuse uninitialized parameters and buffers.

    Raises
    ------
    ConfigError : one is lazy
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()) if model is not None else ():
        if is_lazy(tensor):
            raise ConfigError(
                f"{name!r} is not initialized, as in LazyLinear before its first forward, and so cannot be put back. "
                "Run one forward first: model(batch)."
            )
