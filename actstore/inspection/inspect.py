"""`inspect_step`: a training step run once plainly and once with a store, with all that autograd saves noted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch.nn import Module

from actstore.errors import ActstoreError, ConfigError, StateError
from actstore.inspection.beside import BesideActivations
from actstore.inspection.recorder import Recorder
from actstore.inspection.result import Inspection
from actstore.inspection.suggestions import Suggestion, suggest
from actstore.inspection.timeline import Timeline
from actstore.policy.decision import policy_text
from actstore.rerun.state import ModelState, require_initialized
from actstore.rerun.step import leaves_of, run_backward, takes_store
from actstore.session.activation_store import ActivationStore
from actstore.session.entries import is_active


def inspect_step(
    step: Callable[..., Any], store: ActivationStore, *, stateful: Iterable[Any] = (), try_policies: bool = False
) -> Inspection:
    """Run a training step plainly and with the store, and note each saved tensor, its line, and the memory.

    Parameters
    ----------
    step : a function that runs forward and backward, in one of the forms that `check_gradients` takes
    store : ``ActivationStore(model, policy)``
    stateful : other objects that the step changes, with `state_dict` and `load_state_dict`. Optimizers are found
        automatically
    try_policies : whether to run the step with each policy that is suggested, and measure it

    Returns
    -------
    Inspection : prints itself as a table of the lines that hold most; `plot` draws the memory through the step

    Raises
    ------
    ConfigError : the step does not fit one of the forms, or computes no gradient, or `store` is not an ActivationStore
    StateError : a store is active here, the step did not enter the store that it was given, or it runs graphs that
        ``store.compile()`` made

    Notes
    -----
    The step runs twice plainly, twice with the store and twice with each policy that is tried, each time from the same
    state, which is restored, also after an exception. Later steps cost nothing. Not thread-safe: other threads must not
    train the model meanwhile.
    """
    if not isinstance(store, ActivationStore):
        raise ConfigError(f"store={store!r}: must be an ActivationStore. Make one: ActivationStore(model, 'int8').")
    if is_active():
        raise StateError("inspect_step was called inside a store's context. Call it outside: it enters the store.")
    require_initialized(store.model)
    passes = takes_store(step)
    with ModelState(store.model, (), stateful) as state, closing(ActivationStore(store.model, min_bytes=0)) as kept:

        def run(recorder: Recorder) -> Recorder:
            state.restore()
            try:
                if passes:
                    returned = step(recorder)
                else:
                    with recorder:
                        returned = step()
                if not recorder.entered:
                    raise StateError(
                        "the step did not enter the store that it was given. Write `with store:` around forward."
                    )
                if not recorder.ran_backward:
                    run_backward(dict(leaves_of(returned)))
                del returned
            finally:
                recorder.end()
            return recorder

        run(Recorder(kept, plain=True))  # the first step of a process allocates more than later ones
        plain = run(Recorder(kept, plain=True))
        beside = BesideActivations.of(store.model, plain.gradients_bytes, state.optimizers)
        seen, counted = sum(tensor.saved_bytes for tensor in plain.saved), kept.report().saved_bytes
        if seen != counted:
            raise StateError(
                f"hooks see {seen} of {counted} bytes that the step saves: the rest is in graphs that "
                "store.compile() made. Inspect the model before it is compiled."
            )

        def run_with(store: ActivationStore) -> Timeline:
            run(Recorder(store, plain=False))  # the store learns the order of backward's reads
            stored = run(Recorder(store, plain=False))
            return Timeline(policy_text(store.policy).replace("\n", "; "), tuple(stored.points))

        timeline = Timeline("plain PyTorch", tuple(plain.points))
        stored = run_with(store)
        suggestions = suggest(plain.saved, timeline, beside.optimizer_bytes, plain.device)
        if try_policies:
            suggestions = tuple(_tried(each, store.model, timeline, run_with) for each in suggestions)
        return Inspection(tuple(plain.saved), timeline, stored, beside, suggestions, store.report())


def _tried(
    suggestion: Suggestion, model: Module | None, plain: Timeline, run_with: Callable[[ActivationStore], Timeline]
) -> Suggestion:
    if not suggestion.policy:
        return suggestion
    with closing(ActivationStore(model, suggestion.policy)) as store:
        try:
            added_ms = run_with(store).ms - plain.ms
        except ActstoreError as error:
            return replace(suggestion, error=str(error))
        return replace(suggestion, tried_peak_bytes=store.report().peak_held_bytes, tried_added_ms=added_ms)
