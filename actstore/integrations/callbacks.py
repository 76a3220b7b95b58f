"""Parts of all callbacks: their store, its context around the loss, and its reports at the end of training."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.nn import Module

from actstore.errors import ConfigError, StateError
from actstore.model.names import named_modules
from actstore.session.activation_store import ActivationStore
from actstore.session.arguments import check_policy
from actstore.session.entries import is_active
from actstore.session.job_report import JobReport


@contextmanager
def around_loss(store: ActivationStore) -> Iterator[None]:
    """Enter `store` where gradients are computed; evaluation is not stored.

    Raises
    ------
    StateError : another store is entered on this thread, or other saved-tensor hooks are
    """
    if not torch.is_grad_enabled():
        yield
        return
    if is_active():
        raise StateError(
            "the training step runs inside the context of another ActivationStore, which the framework's store would "
            "disable. Leave out that `with store:`, or the callback."
        )
    hooks: Any = _top_saved_tensors_default_hooks(False)  # None without hooks
    if hooks is not None and hooks[0].__module__ != "torch.utils.checkpoint":  # the store itself handles checkpoint's
        raise StateError(
            f"other saved-tensor hooks are entered around the loss: {_name(hooks[0])}. Of nested hooks only the "
            "innermost ones see tensors, so these would do nothing. Disable them (TRL: "
            "activation_offloading=False), and offload with the store: a rule such as 'raw @ host'.",
            hooks=hooks[0],
        )
    with store:
        yield


def refuse_checkpointing(model: Module) -> None:
    """Refuse gradient checkpointing of Transformers in the forms whose saved tensors a store cannot see.

    Raises
    ------
    ConfigError : it is reentrant, or offloads by itself; the message names the argument
    """
    for name, module, function in _checkpointing(model):
        where = f"gradient checkpointing of {name or type(module).__name__!r}"
        if getattr(function, "keywords", {}).get("use_reentrant"):
            raise ConfigError(
                f"{where} is reentrant: it recomputes inside of backward, where no store is entered, from inputs that "
                'the store may have changed. Give gradient_checkpointing_kwargs={"use_reentrant": False} '
                "(Transformers 5: activation_checkpointing_kwargs), or leave checkpointing out: the policy "
                "'recompute' does the same.",
                module=name,
            )
        if inspect.getmodule(inner := getattr(function, "func", function)) is not torch.utils.checkpoint:
            raise ConfigError(
                f"{where} runs through {_name(inner)}, whose saved-tensor hooks hide its saved tensors from the store. "
                "Leave `offload` out of its arguments, or checkpointing: the policy 'recompute(raw @ host)' does the "
                "same.",
                module=name,
            )


def is_checkpointing(model: Module) -> bool:
    """Return whether gradient checkpointing of Transformers is on in the model."""
    return any(_checkpointing(model))


def disable_checkpointing(model: Module) -> None:
    """Switch off gradient checkpointing of Transformers."""
    for _, module in named_modules(model):
        for name in ("activation_checkpointing_disable", "gradient_checkpointing_disable"):  # of version 5, and before
            if hasattr(type(module), name):
                getattr(module, name)()
                return


def _checkpointing(model: Module) -> Iterator[tuple[str, Module, Any]]:
    """Yield each module that checkpoints, with its name and the function that it checkpoints by."""
    for name, module in named_modules(model):
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is not None and getattr(module, "gradient_checkpointing", False):
            yield name, module, function


def _name(function: Any) -> str:
    owner = inspect.getmodule(function)
    return f"{owner.__name__ if owner else '?'}.{getattr(function, '__qualname__', function)}"


class StoreCallback:
    """The store of a framework's callback, from the start of training to its end.

    Attributes
    ----------
    store : of the training that runs, or ran last; None before the first
    job_report : the report of all ranks, on rank 0 of several, from the end of training on; otherwise None
    """

    def __init__(self, policy: Any, **options: Any) -> None:
        check_policy(policy)
        self._policy = policy
        self._options = options
        self.store: ActivationStore | None = None
        self.job_report: JobReport | None = None

    def _begin(self, model: Module, place: Any, logger: Logger) -> ActivationStore:
        """Make the store for a model in its final form.

        Parameters
        ----------
        place : of the framework, where the store is to be entered

        Raises
        ------
        StateError : another callback enters a store there
        ConfigError : as `refuse_checkpointing` and `ActivationStore`
        """
        other = getattr(place, "callback", None)
        if other is not None:
            raise StateError(
                f"this Trainer has another ActivationStoreCallback already (policy {other._policy!r}). Leave one "
                "of them out: one policy has rules for all modules.",
                callback=other,
            )
        refuse_checkpointing(model)
        self.job_report = None
        self.store = ActivationStore(model, self._policy, **self._options)
        logger.info("activations of %s go by this policy: %s", type(model).__name__, self._policy)
        return self.store

    def _end(self, logger: Logger) -> None:
        """Log the reports, and close the store."""
        if self.store is not None:
            self.job_report = log_reports(self.store, logger)
        self._detach()

    def _detach(self) -> None:
        """Close the store."""
        if self.store is not None:
            self.store.close()


def log_reports(store: ActivationStore, logger: Logger) -> JobReport | None:
    """Log the report of `store`, and on rank 0 the one of all ranks, which it returns; None on the other ranks.

    All ranks of a job with more than one call it. A process alone has no report of all ranks.
    """
    logger.info("activations in the last step:\n%s", store.report())
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    job = store.job_report()
    if job is not None:
        logger.info("activations of all ranks in the last step:\n%s", job)
    return job
