"""Arguments that `check_gradients` and `measure_gradient_error` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from actstore.errors import ConfigError, StateError
from actstore.rerun.state import require_initialized
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
