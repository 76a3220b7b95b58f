"""`fit_step`: the memory that a training step needs under each policy, predicted without its memory."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from actstore.base.units import format_nbytes, parse_nbytes
from actstore.errors import ConfigError, StateError
from actstore.inspection.fit.largest import SizeTrials
from actstore.inspection.fit.plans import AUTO, planned, row_of
from actstore.inspection.fit.result import Fit, FitRow
from actstore.inspection.fit.steps import PLAIN, DrySteps, MakeOptimizer
from actstore.inspection.fit.work import rates_of
from actstore.policy import Auto
from actstore.session.activation_store import MIN_NBYTES
from actstore.session.entries import is_active

POLICIES = ("keep", "recompute", "int8", "int4", "raw @ host", "raw @ disk")
SEARCHED = ("batch", "context")

log = logging.getLogger("actstore.fit")  # a line for each part of a result


def fit_step(
    make_step: Callable[..., Any],
    policies: Iterable[str | Auto] | None = None,
    *,
    memory: int | str | None = None,
    device: str | None = None,
    make_optimizer: MakeOptimizer | None = torch.optim.AdamW,
    min_bytes: int | str = MIN_NBYTES,
    fsdp: int = 1,
    tp: int = 1,
    **sizes: int,
) -> Fit:
    """Predict the peak memory of a training step on a CPU, plainly and under each policy.

    The step runs dry: modules, autograd and the store work as always, but operators return memory that no one touches.

    Parameters
    ----------
    make_step : returns (model, step), as for `actstore inspect`, with all that the step needs; it runs dry, too. It
        builds the model on the CPU or under ``torch.device("meta")``
    policies : texts, as for `ActivationStore`, among them ``"auto(20GiB)"``, and ``"auto"`` for the plan whose step
        fits into `memory`. By default those of `POLICIES`, and with a memory and one rank ``"auto"``
    memory : of the device, such as ``"24GiB"``. The result then has the largest batch and context that fit, where
        `make_step` takes arguments `batch` and `context`
    device : where the step would train: ``"cpu"``, whose rates are measured now, or a GPU such as ``"h100-sxm"``, with
        the rates of its data sheet. The result then has times. On a GPU the host tier is outside of its memory
    make_optimizer : makes the optimizer from the parameters where the step returns its loss; None for none. A step that
        runs backward itself has its own
    min_bytes : as of `ActivationStore`
    fsdp : ranks of data parallelism with FSDP2: `fully_shard` on each block that the model repeats, and on the model
    tp : ranks of tensor parallelism: pairs of linear layers and the heads between them are split in the blocks; all
        between the blocks, and the embedding and the head, is on each rank. All figures are those of one rank
    sizes : arguments for `make_step`

    Returns
    -------
    Fit : prints itself as a table

    Raises
    ------
    ConfigError : `make_step` returns something else, or its step fits no form, asks for an accelerator, or computes no
        gradient; a policy is ``"auto"`` without a memory, or chooses lossy codecs by their errors; a policy plans for
        several ranks; the device is unknown; the ranks of `tp` do not divide a layer, or the model has no such layers
    CapacityError : no plan keeps the budget of a policy ``"auto(20GiB)"``
    PolicyError : a policy does not parse
    StateError : a store is active here

    Notes
    -----
    Operators on at most 64 KiB compute, so that lengths and counters have their values; all other tensors are zeros.

    An operator's time is the longer one of its floating-point operations (those of `torch.utils.flop_counter`) and the
    bytes that it reads and writes, each at its rate: the roofline model of Williams, Waterman and Patterson (2009).
    """
    if is_active():
        raise StateError("fit_step was called inside a store's context. Call it outside: it makes stores of its own.")
    limit = None if memory is None else parse_nbytes(memory, "memory")
    if policies is None:
        policies = POLICIES if limit is None or fsdp * tp > 1 else (*POLICIES, AUTO)
    texts = list(dict.fromkeys((PLAIN, *map(str, policies))))
    for name, ranks in (("fsdp", fsdp), ("tp", tp)):
        if type(ranks) is not int or ranks < 1:
            raise ConfigError(f"{name}={ranks!r}: must be an int >= 1. Use 1 for none.")
    plans = [text for text in texts if planned(text, limit) is not None]
    if plans and fsdp * tp > 1:
        raise ConfigError(f"policy={plans[0]!r}: plans for one rank. Give fsdp=1 and tp=1, or another policy.")
    rates = rates_of(device or "cpu") if plans or device is not None else None

    def steps(**changed: int) -> DrySteps:
        return DrySteps(make_step, {**sizes, **changed}, make_optimizer, rates, fsdp=fsdp, tp=tp, min_bytes=min_bytes)

    searched = {} if limit is None else _searched(make_step, sizes)
    progress = _Progress(len(texts) * (1 + len(searched)))
    made = steps()
    rows: list[FitRow] = []
    for text in texts:
        row = row_of(made, text, limit)
        rows.append(row if device is not None else row._replace(ms=None, times_plain=None))
        progress.note(text, format_nbytes(rows[-1].peak_bytes))
    del made
    fit = Fit(tuple(rows), limit, {**searched, **sizes}, device=device, fsdp=fsdp, tp=tp)
    for name, start in searched.items():
        _search(fit, steps, name, start, progress)
    return fit


class _Progress:
    """Log of the `count` parts of a result."""

    def __init__(self, count: int) -> None:
        self._count, self._ended = count, 0

    def note(self, policy: str, found: str) -> None:
        self._ended += 1
        log.info("%d of %d: %s: %s", self._ended, self._count, policy, found)


def _search(fit: Fit, steps: Callable[..., DrySteps], name: str, start: int, progress: _Progress) -> None:
    """Write the largest value of one size under each policy, and what ends there, to a fit with a limit of memory."""
    assert fit.memory_bytes is not None
    trials = SizeTrials(steps, name, fit.memory_bytes, start)
    for row in fit.rows:
        most, part, error = trials.largest(row)
        fit.largest.setdefault(row.policy, {})[name] = most
        if part is not None:
            fit.parts.setdefault(row.policy, {})[name] = part
        if error is not None:
            fit.errors.setdefault(row.policy, {})[name] = error
        progress.note(row.policy, f"largest {name} {most}")


def _searched(make_step: Callable[..., Any], sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes to search, each with the value that the step has."""
    parameters = inspect.signature(make_step).parameters
    found = {}
    for name in SEARCHED:
        if name in parameters:
            value = sizes.get(name, parameters[name].default)
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"{name}={value!r}: must be an int >= 1. Give make_step a default, or fit_step a value."
                )
            found[name] = value
    return found
