"""`fit_step`: the memory of a training step under each policy, and the largest size that fits, without needing it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from actstore.base.units import format_nbytes, parse_nbytes
from actstore.errors import ConfigError, StateError
from actstore.inspection.fit.memory import Label
from actstore.inspection.fit.plans import AUTO, planned, quick_row_of, row_of
from actstore.inspection.fit.result import Fit, FitRow
from actstore.inspection.fit.steps import LOSS_TILES, PLAIN, DrySteps, MakeOptimizer
from actstore.inspection.fit.work import rates_of
from actstore.policy import Auto
from actstore.session.activation_store import MIN_NBYTES
from actstore.session.entries import is_active

FIXED: tuple[Label, ...] = ("weights", "gradients", "optimizer")  # bytes that depend on no size
ERROR_LENGTH = 160


class SizeTrials:
    """Search for the largest value of one argument.

    Parameters
    ----------
    steps : makes the step, with a value for the argument `name`
    limit : bytes of the memory
    start : the value of the rows
    """

    def __init__(self, steps: Callable[..., DrySteps], name: str, limit: int, start: int) -> None:
        self._steps = steps
        self._name = name
        self._limit = limit
        self._start = start
        self._failed: dict[int, str] = {}  # errors of the plain step, which it has under each policy

    def largest(self, row: FitRow) -> tuple[int, Label | None, str | None]:
        """Return the largest value that fits under the policy of a row, and what the next one meets.

        That is the largest part of its peak, or the error that the step raises, or neither after `MOST_SIZE`.
        """
        failed, parts = dict(self._failed), {self._start: row.largest}

        def needed(value: int) -> int | None:
            if value >= min(failed, default=value + 1):
                return None
            try:
                with _quiet():
                    tried = quick_row_of(self._steps(**{self._name: value}), row.policy, self._limit)
            except Exception as error:  # of the user's code, such as a context that exceeds a table
                failed[value] = f"{type(error).__name__}: {error}".partition("\n")[0][:ERROR_LENGTH]
                return None
            parts[value] = tried.largest
            return tried.peak_bytes

        fixed = sum(row.at_peak.get(label, 0) for label in FIXED)
        at_start = row.peak_bytes if row.frugal_bytes is None else row.frugal_bytes
        found = largest(needed, self._limit, self._start, at_start, fixed)
        if row.policy == PLAIN:
            self._failed = failed
        return found, parts.get(found + 1), failed.get(found + 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what PyTorch logs about an error that it raises, too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


MOST_SIZE = 1 << 24
GROWTH = 8  # factor between guesses, until one does not fit
POINTS = 3  # memory is at most quadratic in a context
PATIENCE = 2  # guesses that leave most of the range, before one in its middle


def largest(needed: Callable[[int], int | None], limit: int, start: int, at_start: int, fixed: int = 0) -> int:
    """Return the largest size that needs at most `limit` bytes, where more size needs more; 0 where 1 does not fit.

    It was tried, or is `start`; so was the next one, which does not fit. With a slow disk a larger one may fit again.

    Parameters
    ----------
    needed : bytes of a size; None where the step fails, as it then does at each larger size
    start, at_start : a size, and the bytes that it needs
    fixed : about the bytes that any size needs
    """
    known = {0: fixed, start: at_start}
    low, high = (start, MOST_SIZE + 1) if at_start <= limit else (0, start)
    poor = 0
    while high - low > 1:
        middle = (low + high) // 2 if high <= MOST_SIZE else min(2 * low, MOST_SIZE)
        if is_middle := poor == PATIENCE:
            guess = middle
        else:
            near = sorted(known, key=lambda size: (size not in (low, high), abs(known[size] - limit)))[:POINTS]
            end = high if high <= MOST_SIZE else min(high, low * GROWTH + 1)
            guess = max(low + 1, _meeting([(size, known[size]) for size in near], limit, low, end))
            if high <= MOST_SIZE and high not in known:  # it fails, and so may those before it
                guess = min(guess, middle)
        before = low, high
        nbytes = needed(guess)
        if nbytes is not None:
            known[guess] = nbytes
        if len(known) > POINTS:
            known.pop(0, None)  # no longer needed: three sizes were tried
        if nbytes is not None and nbytes <= limit:
            low = guess
        else:
            high = guess
        is_good = low >= 2 * before[0] > 0 or 2 * (high - low) <= before[1] - before[0]
        poor = 0 if is_good or is_middle else poor + 1
    return low


def _meeting(points: list[tuple[int, int]], limit: int, low: int, high: int) -> int:
    """Return the largest size from `low` to below `high` where the polynomial through `points` is at most `limit`."""

    def nbytes(size: int) -> float:
        total = 0.0
        for at, value in points:
            weight = float(value)
            for other, _ in points:
                if other != at:
                    weight *= (size - other) / (at - other)
            total += weight
        return total

    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if nbytes(middle) <= limit else (low, middle)
    return low


POLICIES = ("keep", "recompute", "int8", "int4", "raw @ host", "raw @ disk")
SEARCHED = ("batch", "context")
TRANSIENT: tuple[Label, ...] = ("logits", "working")  # that tiles lower
MUCH_SHARE = 0.9  # of a peak: advice is a policy that needs less

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
    **sizes: int | str,
) -> Fit:
    """Predict the peak memory of a training step on a CPU, plainly and under each policy.

    The step runs dry: modules, autograd and the store work as always, but operators return memory that no one touches.

    Parameters
    ----------
    make_step : returns (model, step), as for `actstore inspect`, with all that the step needs; it runs dry, too. It
        builds the model on the CPU or under ``torch.device("meta")``
    policies : texts, as for `ActivationStore`, among them ``"auto(20GiB)"``, and ``"auto"`` for the plan whose step
        fits into `memory`. By default those of `POLICIES`, and with a memory and one rank ``"auto"``;
        for a size "auto" those that recompute all, in tiles where the model takes them
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
    sizes : arguments for `make_step`. ``context="auto"`` (or batch) finds the largest context that fits under any
        policy, and predicts its step

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
    unknown = _unknown(make_step, sizes, limit)
    given = policies
    fixed: dict[str, Any] = {name: size for name, size in sizes.items() if name not in unknown}
    if policies is None:
        policies = ("recompute",) if unknown else POLICIES if limit is None or fsdp * tp > 1 else (*POLICIES, AUTO)
    texts = list(dict.fromkeys((PLAIN, *map(str, policies))))
    for name, ranks in (("fsdp", fsdp), ("tp", tp)):
        if type(ranks) is not int or ranks < 1:
            raise ConfigError(f"{name}={ranks!r}: must be an int >= 1. Use 1 for none.")
    plans = [text for text in texts if planned(text, limit) is not None]
    if plans and fsdp * tp > 1:
        raise ConfigError(f"policy={plans[0]!r}: plans for one rank. Give fsdp=1 and tp=1, or another policy.")
    rates = rates_of(device or "cpu") if plans or unknown or device is not None else None

    def steps(**changed: int) -> DrySteps:
        return DrySteps(make_step, {**fixed, **changed}, make_optimizer, rates, fsdp=fsdp, tp=tp, min_bytes=min_bytes)

    searched = {} if limit is None else _searched(make_step, fixed, unknown or SEARCHED)
    progress = _Progress(len(texts) * (1 + len(searched)))
    made = steps()
    rows: list[FitRow] = []
    for text in texts:
        rows.append(row_of(made, text, limit))
        progress.note(text, format_nbytes(rows[-1].peak_bytes))
    advice = "" if unknown else _advice(made, min(rows, key=_peak))
    if unknown and given is None:
        rows += (tiled := made.tiled())
        progress.count += len(tiled)
    del made
    shown = rows if device is not None else [row._replace(ms=None, times_plain=None) for row in rows]
    fit = Fit(tuple(shown), limit, {**searched, **fixed}, device=device, advice=advice, fsdp=fsdp, tp=tp)
    for name, start in searched.items():
        _search(fit, steps, name, start, progress)
    return _with_best(fit, steps, unknown[0]) if unknown else fit


def _unknown(make_step: Callable[..., Any], sizes: dict[str, int | str], limit: int | None) -> list[str]:
    """Return the name of the size that is "auto", in a list; an empty one where all sizes are given."""
    for name in SEARCHED:
        if isinstance(size := sizes.get(name), str) and size != "auto":
            raise ConfigError(f'{name}={size!r}: must be a whole number, or "auto". Write {name}=1024.')
    unknown = [name for name in SEARCHED if sizes.get(name) == "auto"]
    if unknown and (limit is None or len(unknown) > 1 or unknown[0] not in inspect.signature(make_step).parameters):
        name = unknown[0]
        raise ConfigError(f'{name}="auto": must be one argument of make_step, with a memory. Write memory="24GiB".')
    return unknown


def _with_best(fit: Fit, steps: Callable[..., DrySteps], name: str) -> Fit:
    """Return a fit with the step at the largest value of a size, under the first policy that reaches it."""
    policy = max(fit.largest, key=lambda policy: fit.largest[policy][name])
    if not fit.largest[policy][name]:
        return fit
    at = steps(**{name: fit.largest[policy][name]})
    at.row(PLAIN)  # the times of the other row are multiples of its own
    best = row_of(at, policy, fit.memory_bytes)
    return replace(fit, best=best, advice=_advice(at, best))


def _advice(steps: DrySteps, least: FitRow) -> str:
    """Return how tiles lower the peak of the row that needs least; empty where they do not."""
    if least.largest not in TRANSIENT:
        return ""
    tiled = min(steps.tiled(), key=_peak, default=least)
    lead = (
        f"{least.policy} needs least, {format_nbytes(least.peak_bytes)}, most of it at {least.peak_at}. Tiles need less"
    )
    if tiled.peak_bytes <= MUCH_SHARE * least.peak_bytes:
        return f"{lead}: {tiled.policy!r} needs {format_nbytes(tiled.peak_bytes)}"
    if least.largest == "logits" and "tiles" not in least.policy:
        nbytes = least.at_peak["logits"]
        return (
            f"{lead}: logits take {format_nbytes(nbytes)} of it, and {format_nbytes(nbytes // LOSS_TILES)} where the "
            f"last linear layer and the loss are a function with @actstore.tile(tiles={LOSS_TILES})"
        )
    return ""


def _peak(row: FitRow) -> int:
    return row.peak_bytes


class _Progress:
    """Log of the parts of a result.

    Attributes
    ----------
    count : of the parts
    """

    def __init__(self, count: int) -> None:
        self.count, self._ended = count, 0

    def note(self, policy: str, found: str) -> None:
        self._ended += 1
        log.info("%d of %d: %s: %s", self._ended, self.count, policy, found)


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


def _searched(make_step: Callable[..., Any], sizes: dict[str, Any], wanted: Iterable[str]) -> dict[str, int]:
    """Return the sizes to search, each with the value that the step has."""
    parameters = inspect.signature(make_step).parameters
    found = {}
    for name in wanted:
        if name in parameters:
            value = sizes.get(name, parameters[name].default)
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"{name}={value!r}: must be an int >= 1. Give make_step a default, or fit_step a value."
                )
            found[name] = value
    return found
