"""Callback that uses the store in Lightning's Trainer."""

from __future__ import annotations

import logging
from typing import Any

from actstore.integrations.callbacks import StoreCallback, around_loss
from actstore.integrations.figures import figures
from actstore.session.activation_store import ActivationStore

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("lightning"):
        raise
    try:
        from pytorch_lightning import Callback  # the package's older name
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "actstore.integrations.lightning is for Lightning, which is not installed. "
            "Run pip install 'actstore[lightning]'.",
            name=error.name,
        ) from error

_logger = logging.getLogger(__name__)


class ActivationStoreCallback(StoreCallback, Callback):
    """Callback that trains with a store: ``Trainer(callbacks=[ActivationStoreCallback("recompute")])``.

    The store is entered around each `training_step`; validation and test are not stored. Its figures go to the loggers
    (such as `actstore/held_MiB`) every `log_every_n_steps`, and its report is logged when training ends; on rank 0
    of several also that of all ranks.

    Parameters
    ----------
    policy : as for ActivationStore: text over the names in the LightningModule (``net.blocks.*``); ``"recompute"`` or
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
        for the rest, and for a Transformers model whose gradient checkpointing is reentrant or offloads by itself
    StateError : when training begins, if the Trainer has another such callback; in its first step, if the step runs
        inside another store or other saved-tensor hooks

    Notes
    -----
    Nothing is attached to the model: the store is entered where the Trainer's strategy runs the step. Under manual
    optimization backward runs inside of the context, too. The Trainer's checkpoints have the store's state, and
    ``trainer.fit(ckpt_path=)`` goes on from it. Of several ranks they have that of rank 0, which all ranks load.
    """

    def __init__(self, policy: Any, **options: Any) -> None:
        super().__init__(policy, **options)
        self._logged = -1
        self._strategy: Any = None
        self._state: dict[str, Any] | None = None  # loaded, for the next store

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Build the store for the model, which is in its final form here, and make the strategy enter it."""
        self._detach()
        store = self._begin(pl_module, trainer.strategy.training_step, _logger)
        state, self._state = self._state, None
        if state is not None:
            store.load_state_dict(state)
        self._strategy = trainer.strategy
        self._strategy.training_step = _TrainingStep(self, trainer.strategy.training_step, store)
        self._logged = -1

    def state_dict(self) -> dict[str, Any]:
        """Return the store's state for a checkpoint of the Trainer; empty before training."""
        return {} if self.store is None else self.store.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a checkpoint into the store, when training begins.

        Raises
        ------
        StateError : when training begins, if the state is one of another model, policy, `seed` or `min_bytes`
        """
        self._state = state_dict

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        """Log the figures."""
        step = trainer.global_step
        if self.store is not None and step % trainer.log_every_n_steps == 0 and step != self._logged:
            self._logged = step
            for logger in trainer.loggers:
                logger.log_metrics(figures(self.store.report()), step=step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the reports, restore the strategy and close the store."""
        self._end(_logger)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the strategy and close the store."""
        self._detach()

    def _detach(self) -> None:
        if self._strategy is not None:
            del self._strategy.training_step
            self._strategy = None
        super()._detach()


class _TrainingStep:
    """A strategy's `training_step` inside the store."""

    def __init__(self, callback: ActivationStoreCallback, original: Any, store: ActivationStore) -> None:
        self.callback = callback
        self._original = original
        self._store = store

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with around_loss(self._store):
            return self._original(*args, **kwargs)
