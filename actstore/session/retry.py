"""Calls inside a store's context, run once more where memory ran out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Module

from actstore.auto.attempt import Attempt
from actstore.auto.controller import AutoController
from actstore.session.graph_controller import GraphController
from actstore.session.step_policy import StepPolicy


def call_inside(
    store: AbstractContextManager[Any],
    controller: StepPolicy | None,
    model: Module | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `function` inside of `store`: once more if memory runs out and its effects can be undone."""
    eager = controller.eager if isinstance(controller, GraphController) else controller
    if not isinstance(eager, AutoController) or model is None:
        with store:
            return function(*args, **kwargs)
    attempt = Attempt(model, (args, kwargs))
    try:
        with store:
            return function(*args, **kwargs)
    except BaseException as error:
        if not eager.tightened(error):
            raise
        why = attempt.undo()
        if why:
            error.add_note(f"actstore: the step was not run again, because {why}")
            raise
    with store:
        return function(*args, **kwargs)
