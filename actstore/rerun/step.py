"""A user's training step, in any of the accepted forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from actstore.errors import ConfigError


def takes_store(step: Callable[..., Any]) -> bool:
    """Return whether a step takes the store as its argument.

    Raises
    ------
    ConfigError : the step is not callable, or requires more than one argument
    """
    if not callable(step):
        raise ConfigError(f"step={step!r}: must be a function that runs forward and backward.")
    needed = [
        parameter.name
        for parameter in inspect.signature(step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(needed) > 1:
        raise ConfigError(
            f"the step takes {', '.join(needed)}. Write one that takes nothing, such as lambda: train(model, x, y), "
            "or the store, which it then enters itself."
        )
    return bool(needed)


def leaves_of(returned: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers that a step returned, with their names."""
    for path, leaf in tree_flatten_with_path(returned)[0]:
        if isinstance(leaf, Tensor) or is_number(leaf):
            yield f"returned{keystr(path)}", leaf


def is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.layout is torch.strided
    return isinstance(value, int | float)


def run_backward(outputs: dict[str, Any]) -> None:
    """Run backward from `loss_of(outputs)`, for a step that returned its loss instead."""
    torch.autograd.backward(loss_of(outputs))


def loss_of(outputs: dict[str, Any]) -> Tensor:
    """Return the loss of a step that ran no backward itself.

    Raises
    ------
    ConfigError : the step returned no loss
    """
    for value in outputs.values():
        if isinstance(value, Tensor) and value.requires_grad:
            if value.numel() != 1:
                raise ConfigError(
                    f"the step ran no backward and returned a tensor of shape {list(value.shape)}. Have it return the "
                    "loss, a single number, or call backward itself."
                )
            return value
    raise no_gradient()


def no_gradient() -> ConfigError:
    """Return the error of a step that computes no gradient of the model."""
    return ConfigError(
        "the step computed no gradient: it ran no backward through the model or `inputs`, and returned no loss that "
        "requires a gradient. Make the store with the model, ActivationStore(model, ...), and have the step call "
        "loss.backward() or return the loss."
    )
