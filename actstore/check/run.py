"""Runs of a training step from a known state, and the comparison of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actstore.check.result import TensorComparison
from actstore.check.watch import Key, RunWatch
from actstore.errors import ConfigError, StateError
from actstore.model.names import named_modules
from actstore.rerun.state import ModelState, require_initialized
from actstore.rerun.step import is_number, leaves_of, run_backward, takes_store
from actstore.rerun.values import Error, compare, copies
from actstore.session.activation_store import ActivationStore
from actstore.session.entries import is_active

Leaves = dict[str, Tensor]


def read_leaves(
    caller: str, store: ActivationStore, inputs: Mapping[str, Tensor] | Iterable[Tensor]
) -> tuple[Leaves, Leaves]:
    """Return the inputs by name, and the same together with the parameters of the store's model.

    Raises
    ------
    ConfigError : `store` is not an ActivationStore, or the model has uninitialized parameters
    StateError : a store is active on this thread
    """
    if not isinstance(store, ActivationStore):
        raise ConfigError(f"store={store!r}: must be an ActivationStore, as ActivationStore(model, 'int8 @ host').")
    if is_active():
        raise StateError(f"{caller} was called inside a store's context. Call it outside, it enters the store.")
    require_initialized(store.model)
    named = dict(inputs) if isinstance(inputs, Mapping) else {f"inputs[{i}]": x for i, x in enumerate(inputs)}
    return named, {**(dict(store.model.named_parameters()) if store.model is not None else {}), **named}


Copies = dict[str, list[Tensor]]  # parts of tensors in host memory, by name


@dataclass
class Outcome:
    """Results of a run: copies in host memory."""

    watch: RunWatch
    loss: float | None
    gradients: Copies
    outputs: Copies
    buffers: Copies


class Runner:
    """Runner of a step, each time from the same state."""

    def __init__(
        self,
        step: Callable[..., Any],
        store: ActivationStore,
        leaves: dict[str, Tensor],
        state: ModelState,
    ) -> None:
        self._step, self._store, self._state, self._leaves = step, store, state, leaves
        self._takes_store = takes_store(step)
        self._model = store.model

    def plain(self, capture: Key | None = None) -> Outcome:
        """Run without the store."""
        return self._run(None, capture)

    def stored(self, capture: Key | None = None) -> Outcome:
        """Run with the store: around the step, or passed to it."""
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
        with RunWatch(names, self._leaves, refuse, capture) as watch:
            if self._takes_store:
                returned = self._step(store or nullcontext())
            else:
                with store or nullcontext():
                    returned = self._step()
            outputs = dict(leaves_of(returned))
            if not watch.ran_backward:
                run_backward(outputs)
            watch.read()
            return Outcome(
                watch,
                next((_number(value) for value in outputs.values() if is_number(value)), None),
                self._gradients(watch),
                {name: _copied(value) for name, value in outputs.items()},
                {name: copies(buffer) for name, buffer in model.named_buffers()} if model is not None else {},
            )

    def _gradients(self, watch: RunWatch) -> Copies:
        """Return the gradients as autograd accumulated them, or, without these, as the step left them."""
        return {
            name: found
            for name, leaf in self._leaves.items()
            if (found := watch.gradients.get(name) or (copies(leaf.grad) if leaf.grad is not None else []))
        }


def rows(expected: Copies, found: Copies) -> tuple[TensorComparison, ...]:
    """Compare every tensor of two runs. A tensor that one run lacks differs."""
    made = []
    for name, wanted in expected.items():
        made.append(_row(name, wanted, compare(found.get(name, []), wanted)))
    made += [_row(name, extra, compare(extra, [])) for name, extra in found.items() if name not in expected]
    return tuple(made)


def _row(name: str, parts: list[Tensor], error: Error) -> TensorComparison:
    shape, dtype = (tuple(parts[0].shape), str(parts[0].dtype).removeprefix("torch.")) if parts else ((), "none")
    return TensorComparison(name, shape, dtype, error.equal, error.norm, error.off, error.max_abs)


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _copied(value: Any) -> list[Tensor]:
    return copies(value) if isinstance(value, Tensor) else [torch.tensor(value)]


def _allow() -> None:
    pass


def _refuse_store() -> None:
    if is_active():
        raise StateError(
            "the step entered a store in the plain run. Make the step take the store as its argument and enter it: "
            "def step(store): with store: ..."
        )
