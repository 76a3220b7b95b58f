"""Callback that uses the store in the Trainer of Transformers, and in those of TRL."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actstore.errors import ConfigError, StateError
from actstore.integrations.callbacks import StoreCallback, around_loss
from actstore.integrations.figures import figures
from actstore.session.activation_store import ActivationStore

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "actstore.integrations.huggingface is for Transformers, which is not installed. "
        "Run pip install 'actstore[hf]'.",
        name=error.name,
    ) from error

_logger = logging.getLogger(__name__)


class ActivationStoreCallback(StoreCallback, TrainerCallback):
    """Callback that trains with a store: ``Trainer(..., callbacks=[ActivationStoreCallback("recompute")])``.

    The store is entered around the loss of each training step, gradient accumulation included; evaluation is not
    stored. Its figures, such as `actstore/held_MiB`, join the rows that the Trainer logs (TensorBoard has them as
    ``train/actstore/held_MiB``), and its report is logged when training ends; on rank 0
    of several also that of all ranks.

    Parameters
    ----------
    policy : as for ActivationStore: text over the names of the model, with or without LoRA; ``"recompute"`` or
        ``"int8"`` for everything; ``"@mlp : recompute; @attention : int8"``; ``"auto(20GiB)"``; Rules, a Plan
    options : of ActivationStore, such as ``tiers=[Host("64GiB")]``

    Attributes
    ----------
    store : the store of the training that runs, or ran last; None before the first. It is closed when training ends;
        `store.report()` and `store.plan` go on being there
    job_report : the report of all ranks, on rank 0 of several, from the end of training on; otherwise None

    Raises
    ------
    PolicyError, ChainError, UnknownCodecError, ConfigError : when made, for what needs no model; when training begins,
        for the rest, for gradient checkpointing that is reentrant or offloads by itself, and for DataParallel
    StateError : when training begins, if the Trainer has another such callback; in its first step, if the step runs
        inside another store or other saved-tensor hooks

    Notes
    -----
    The Trainer enters the store in its context for losses (`compute_loss_context_manager`). The callback attaches
    nothing to the model, so that checkpoints, copies and pickles of it are what they are without a store, also after
    training that failed. The Trainer does not pass itself to callbacks: this callback finds it among the callers of
    `on_train_begin`, as the object whose callbacks include this one.

    Each process adds the store's state to the checkpoints of the Trainer, as `actstore_state_0.json` and so on.
    ``trainer.train(resume_from_checkpoint=)`` goes on from it; a process without a file of its own, because there were
    fewer before, takes that of process 0.
    """

    def __init__(self, policy: Any, **options: Any) -> None:
        super().__init__(policy, **options)
        self._trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Build the store for the model, which is in its final form here, and make the Trainer enter it."""
        self._detach()
        trainer, checkpoint = self._find_trainer()
        if args.n_gpu > 1:
            raise ConfigError(
                f"the Trainer would run {args.n_gpu} devices by DataParallel, on threads that enter no store. Start a "
                f"process for each device: torchrun --nproc-per-node {args.n_gpu}.",
                devices=args.n_gpu,
            )
        store = self._begin(model, trainer.compute_loss_context_manager, _logger)
        if checkpoint is not None:
            _load(store, Path(checkpoint), args.process_index)
        trainer.compute_loss_context_manager = _Context(self, trainer.compute_loss_context_manager, store)
        trainer.log = _Log(trainer.log, store)
        self._trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Add the store's state to the checkpoint that the Trainer has saved."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if self.store is not None and not args.save_only_model and folder.is_dir():
            _file(folder, args.process_index).write_text(json.dumps(self.store.state_dict()), encoding="utf-8")

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Log the reports, restore the Trainer and close the store."""
        self._end(_logger)

    def _detach(self) -> None:
        """Restore the Trainer and close its store. After training that failed, the next training does this."""
        if self._trainer is not None:
            del self._trainer.compute_loss_context_manager, self._trainer.log
            self._trainer = None
        super()._detach()

    def _find_trainer(self) -> tuple[Any, Any]:
        """Return the Trainer that calls, and the folder of the checkpoint that it goes on from; None for none."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            handler = getattr(caller, "callback_handler", None)
            if any(callback is self for callback in getattr(handler, "callbacks", ())):
                return caller, frame.f_locals.get("resume_from_checkpoint")
            frame = frame.f_back
        raise StateError(
            "on_train_begin was not called by a Trainer that has this callback. In a loop of your own use the store "
            "itself: with ActivationStore(model, policy): loss = model(**batch).loss."
        )


def _file(folder: Path, process: int) -> Path:
    return folder / f"actstore_state_{process}.json"


def _load(store: ActivationStore, folder: Path, process: int) -> None:
    """Load the state that a checkpoint has for a process, or else that of process 0."""
    found = [path for path in (_file(folder, process), _file(folder, 0)) if path.is_file()]
    if found:
        store.load_state_dict(json.loads(found[0].read_text(encoding="utf-8")))
    else:
        _logger.info("%s has no state of a store: its steps count from 0", folder)


class _Context:
    """Context in which a Trainer computes losses: its own context, and the store inside."""

    def __init__(self, callback: ActivationStoreCallback, original: Any, store: ActivationStore) -> None:
        self.callback = callback
        self._original = original
        self._store = store

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._original(), around_loss(self._store):
            yield


class _Log:
    """A Trainer's `log`, which adds the store's figures to rows of training."""

    def __init__(self, original: Any, store: ActivationStore) -> None:
        self._original = original
        self._store = store

    def __call__(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs = {**logs, **figures(self._store.report())}
        self._original(logs, *args, **kwargs)
