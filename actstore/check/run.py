"""One run of a training step from a known state, and how it differs from another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from actstore.check.result import Row
from actstore.check.state import State
from actstore.check.values import Error, compare, copies
from actstore.check.watch import Key, Watch
from actstore.errors import ConfigError, StateError
from actstore.modules import named_modules
from actstore.session import ActivationStore, is_active

Copies = dict[str, list[Tensor]]  # parts of tensors in host memory, by name


@dataclass
class Outcome:
    """What a run gave: copies in host memory."""

    watch: Watch
    loss: float | None
    gradients: Copies
    outputs: Copies
    buffers: Copies


class Runner:
    """Runs a step again and again from the same state."""

    def __init__(
        self,
        step: Callable[..., Any],
        store: ActivationStore,
        leaves: dict[str, Tensor],
        state: State,
    ) -> None:
        self._step, self._store, self._state, self._leaves = step, store, state, leaves
        self._takes_store = _takes_argument(step)
        self._model = store.model

    def plain(self, capture: Key | None = None) -> Outcome:
        """Run without the store."""
        return self._run(None, capture)

    def stored(self, capture: Key | None = None) -> Outcome:
        """Run with the store around the step, or given to it."""
        try:
            return self._run(self._store, capture)
        except Exception as error:
            error.add_note("This was raised with the store; the same step without it ran to its end.")
            raise

    def _run(self, store: ActivationStore | None, capture: Key | None) -> Outcome:
        self._state.restore()
        model = self._model
        names = {module: name for name, module in named_modules(model)} if model is not None else {}
        refuse = _refuse_store if store is None else _allow
        with Watch(names, self._leaves, refuse, capture) as watch:
            if self._takes_store:
                returned = self._step(store or nullcontext())
            else:
                with store or nullcontext():
                    returned = self._step()
            outputs = dict(_leaves_of(returned))
            if not watch.ran_backward:
                _backward(outputs)
            watch.read()
            return Outcome(
                watch,
                next((_number(value) for value in outputs.values() if _is_number(value)), None),
                self._gradients(watch),
                {name: _copied(value) for name, value in outputs.items()},
                {name: copies(buffer) for name, buffer in model.named_buffers()} if model is not None else {},
            )

    def _gradients(self, watch: Watch) -> Copies:
        """The gradients as they were accumulated, or as the step left them where it did so itself."""
        return {
            name: found
            for name, leaf in self._leaves.items()
            if (found := watch.gradients.get(name) or (copies(leaf.grad) if leaf.grad is not None else []))
        }


def rows(expected: Copies, found: Copies) -> tuple[Row, ...]:
    """Every tensor of two runs. One that is missing in a run differs."""
    made = []
    for name, wanted in expected.items():
        made.append(_row(name, wanted, compare(found.get(name, []), wanted)))
    made += [_row(name, extra, compare(extra, [])) for name, extra in found.items() if name not in expected]
    return tuple(made)


def _row(name: str, parts: list[Tensor], error: Error) -> Row:
    shape, dtype = (tuple(parts[0].shape), str(parts[0].dtype).removeprefix("torch.")) if parts else ((), "none")
    return Row(name, shape, dtype, error.equal, error.norm, error.off, error.max_abs)


def _takes_argument(step: Callable[..., Any]) -> bool:
    """Whether a step wants to be given the store.

    Raises
    ------
    ConfigError : it cannot be called, or wants more than that
    """
    if not callable(step):
        raise ConfigError(f"step={step!r} is not a function; give one that runs forward and backward")
    needed = [
        parameter.name
        for parameter in inspect.signature(step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(needed) > 1:
        raise ConfigError(
            f"the step takes {', '.join(needed)}; write one that takes nothing, such as lambda: train(model, x, y), "
            "or the store, which it then enters itself"
        )
    return bool(needed)


def _leaves_of(returned: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers that a step returned, by name."""
    for path, leaf in tree_flatten_with_path(returned)[0]:
        if isinstance(leaf, Tensor) or _is_number(leaf):
            yield f"returned{keystr(path)}", leaf


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.layout is torch.strided
    return isinstance(value, int | float)


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _copied(value: Any) -> list[Tensor]:
    return copies(value) if isinstance(value, Tensor) else [torch.tensor(value)]


def _backward(outputs: dict[str, Any]) -> None:
    """Run the backward that the step left to us."""
    for value in outputs.values():
        if isinstance(value, Tensor) and value.requires_grad:
            if value.numel() != 1:
                raise ConfigError(
                    f"the step ran no backward and returned a tensor of shape {list(value.shape)}; have it return the "
                    "loss, a single number, or call backward itself"
                )
            torch.autograd.backward(value)
            return
    raise ConfigError(
        "the step computed no gradient: it ran no backward through the model or `inputs`, and returned no loss that "
        "requires a gradient. Make the store with the model, ActivationStore(model, ...), and have the step call "
        "loss.backward() or return the loss"
    )


def _allow() -> None:
    pass


def _refuse_store() -> None:
    if is_active():
        raise StateError(
            "the step entered a store where it was to run plainly; let the step take the store and enter that: "
            "def step(store): with store: ..."
        )
