"""`check_gradients`: the user's step without and with the store, and the first difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from actstore.check.result import Difference, GradientCheck, TensorComparison, Verdict
from actstore.check.run import Key, Outcome, Runner, first_difference, read_leaves, rows
from actstore.errors import ConfigError
from actstore.policy.decision import policy_text
from actstore.rerun.state import ModelState
from actstore.rerun.step import no_gradient
from actstore.rerun.values import compare
from actstore.session.activation_store import ActivationStore


def check_gradients(
    step: Callable[..., Any],
    store: ActivationStore,
    *,
    inputs: Mapping[str, Tensor] | Iterable[Tensor] = (),
    stateful: Iterable[Any] = (),
    tolerance: float = 0.0,
    steps: int = 2,
) -> GradientCheck:
    """Run a training step without and with the store, from the same state, and compare all results.

    Parameters
    ----------
    step : a function that runs forward and backward, in one of three forms. Without arguments, it runs inside the
        store. Where it returns the loss and leaves backward out, backward runs after the context. With one argument, it
        gets the store and enters it itself (the plain run passes `contextlib.nullcontext()`). It may step an optimizer.
        What it returns is compared; the first number is shown as the loss.
    store : ``ActivationStore(model, policy)``; parameters and buffers of this model are compared
    inputs : more leaf tensors whose gradients to compare
    stateful : other objects that the step changes, with `state_dict` and `load_state_dict`: schedulers, gradient
        scalers. Optimizers are found automatically, except one that the step makes for parameters outside the model
    tolerance : the largest relative error (norm of the difference by norm) of a gradient, an output or a buffer that
        passes; 0: bit for bit. A gradient that is zero but for rounding is judged by the norm of all gradients
    steps : number of runs with the store, each from the same state. In the first run a store learns the order of
        backward's fetches; from the second on it fetches ahead

    Returns
    -------
    GradientCheck : its `verdict`, `first` difference and tables; "no verdict" where plain training is not reproducible

    Raises
    ------
    ConfigError : the step does not fit one of the forms, or computes no gradient, or the model has uninitialized
        parameters
    StateError : a store is active here, or the step's plain run entered a store
    Any error of the step, with a note where only the run with the store raised it

    Notes
    -----
    The model, gradients, optimizers and random generators are restored, also after an exception. Gradients of
    parameters outside the model are restored where an optimizer has these, or `inputs` lists them. The step runs three
    times plainly (the first one warms up), `steps` times with the store, and twice more where they differ. Activations
    are compared by checksums; parameters, gradients and optimizer states are copied to host memory. Every run waits for
    the device. Not thread-safe: other threads must not train the model or use the global generators meanwhile.
    """
    if not tolerance >= 0:
        raise ConfigError(
            f"tolerance={tolerance!r}: must be 0 or more. Give 0 for bit-equal, or a relative error such as 0.01."
        )
    if steps < 1:
        raise ConfigError(f"steps={steps!r}: must be 1 or more.")
    named, leaves = read_leaves("check_gradients", store, inputs)
    with ModelState(store.model, named.values(), stateful) as state:
        runner = Runner(step, store, leaves, state)
        runner.plain()  # the first step of a process may choose other kernels than later ones
        expected, again = runner.plain(), runner.plain()
        if not expected.gradients:
            raise no_gradient()
        twice = _RunComparison(expected, again)
        if not twice.equal:
            return twice.result(store, 0.0, "no verdict", 0)
        runs, passed, comparison = 0, True, twice
        while passed and runs < steps:
            runs += 1
            latest = _RunComparison(expected, runner.stored())
            passed = latest.passes(tolerance)
            if comparison.equal or not passed:
                comparison = latest
        key = comparison.key
        if comparison.equal:
            return comparison.result(store, tolerance, "equal", runs)
        once_more = _RunComparison(expected, runner.plain(capture=key))
        if not once_more.equal:
            return once_more.result(store, 0.0, "no verdict", 0)
        result = comparison.result(store, tolerance, "within tolerance" if passed else "different", runs)
        if key is None or result.first is None:
            return result
        wanted, found = once_more.found.watch.captured, runner.stored(capture=key).watch.captured
        if wanted is None or found is None:
            return result
        error = compare(found, wanted)
        if error.equal:
            return result
        return replace(result, first=replace(result.first, relative_error=error.relative, max_abs_error=error.max_abs))


class _RunComparison:
    """Two runs side by side."""

    def __init__(self, expected: Outcome, found: Outcome) -> None:
        self.expected, self.found = expected, found
        self.parameters = rows(expected.gradients, found.gradients)
        self.outputs = rows(expected.outputs, found.outputs)
        self.buffers = rows(expected.buffers, found.buffers)
        self.key: Key | None = first_difference(expected.watch, found.watch)

    @property
    def rows(self) -> tuple[TensorComparison, ...]:
        return (*self.parameters, *self.outputs, *self.buffers)

    @property
    def equal(self) -> bool:
        return self.key is None and all(row.equal for row in self.rows)

    def passes(self, tolerance: float) -> bool:
        """Return whether all errors are within the tolerance; 0 requires equal bits, also of activations."""
        if not tolerance:
            return self.equal
        norm, numel = math.hypot(*(row.norm for row in self.parameters)), sum(map(_numel, self.parameters))
        return all(row.passes(tolerance) for row in (*self.outputs, *self.buffers)) and all(
            row.passes(tolerance, norm * math.sqrt(_numel(row) / numel)) for row in self.parameters if _numel(row)
        )

    def first(self) -> Difference | None:
        """Return the first difference, without its size."""
        key = self.key
        if key is None:
            return self._first_row()
        seen = self.expected.watch.seen[key]
        return Difference(
            "forward output" if key.kind == "output" else "gradient",
            key.module,
            key.call,
            key.operation,
            key.kind == "incoming",
            key.place,
            seen.shape,
            str(seen.dtype).removeprefix("torch."),
        )

    def _first_row(self) -> Difference | None:
        """Return the first difference outside of modules, for runs whose modules computed the same."""
        for kind, group in (
            ("output of the step", self.outputs),
            ("gradient", self.parameters),
            ("buffer", self.buffers),
        ):
            for row in group:
                if not row.equal:
                    return Difference(
                        kind, None, 0, "", False, 0, row.shape, row.dtype, row.relative_error, row.max_abs_error,
                        row.name,
                    )  # fmt: skip
        return None

    def result(self, store: ActivationStore, tolerance: float, verdict: Verdict, runs: int) -> GradientCheck:
        report = store.report()
        plain, found = self.expected.loss, self.found.loss
        return GradientCheck(
            verdict,
            self.first(),
            policy_text(store.policy),
            tolerance,
            None if plain is None or found is None else (plain, found),
            self.parameters,
            self.outputs,
            self.buffers,
            runs,
            report.saved_bytes,
            report.stored_bytes,
            report.held_bytes,
        )


def _numel(row: TensorComparison) -> int:
    return math.prod(row.shape)
