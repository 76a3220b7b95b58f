"""The model and the training step that a user's function has made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from actstore.errors import ConfigError

MAKE_STEP = "make_step"
EXAMPLE = """\
def make_step():
    model = MyModel()
    x, y = one_batch()  # the same at every call of step
    def step():
        return loss_function(model(x), y)  # the loss; or run backward here too
    return model, step"""


@dataclass(frozen=True)
class Target:
    """A model, its training step as `actstore.check_gradients` takes it, and the same step on other batches."""

    name: str
    model: Module
    step: Callable[..., Any]
    others: tuple[Callable[..., Any], ...] = ()


def read_target(target: str, made: Any) -> Target:
    """Return the model and the step that the user's function has made.

    Raises
    ------
    ConfigError : it made something else
    """
    match made:
        case (Module() as model, step) if callable(step):
            return Target(target, model, step)
        case (Module() as model, step, [*others]) if callable(step) and all(map(callable, others)):
            return Target(target, model, step, tuple(others))
        case _ if callable(made) and isinstance(getattr(made, "model", None), Module):
            return Target(target, made.model, made)
    raise ConfigError(
        f"{target} returned {type(made).__name__}, neither (model, step) nor a step with an attribute `model`. "
        f"Write it so:\n\n{EXAMPLE}"
    )
