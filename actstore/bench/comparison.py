"""Comparisons of rows: each growth between two results, and each peer beside the fastest row of actstore."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actstore.bench.peers.rows import BITSANDBYTES, COMPILERS, Row, plan
from actstore.bench.result import Duel, Result, RowResult

BOOTSTRAP_DRAWS = 4000  # bootstrap resamples
CONFIDENCE = 0.95
IN_TRANSIT_SHARE = 0.1  # fraction of the saved bytes that may be in transit to a tier when forward ends

_MACHINE_FIELDS = ("system", "processor", "cores", "gpu", "gpu_capability", "cuda", "torch", "text_sha256")
_LENGTH_FIELDS = ("steps", "warmup")  # fields of a workload that set the length of the run, not its subject


@dataclass(frozen=True)
class Growth:
    """Ratio of new to old, and its interval at `CONFIDENCE`; a point where nothing can be resampled."""

    low: float
    middle: float
    high: float

    def above(self, limit: float) -> bool:
        """Return whether the growth exceeds `limit` over its whole interval."""
        return self.low > 1 + limit


@dataclass(frozen=True)
class Change:
    """One row in both results.

    Attributes
    ----------
    time : growth of the step time, in multiples of plain's in the same run; None for plain, their unit
    held : growth of `held_bytes`
    worse : everything else that got worse, in words; empty for nothing
    """

    old: RowResult
    new: RowResult
    time: Growth | None
    held: Growth | None
    worse: str

    def complaints(self, limit: float) -> Iterator[str]:
        """Yield each figure that certainly grew by more than the fraction `limit`."""
        if self.worse:
            yield self.worse
        for what, growth in (("takes", self.time), ("holds", self.held)):
            if growth is not None and growth.above(limit):
                yield f"{what} {100 * (growth.middle - 1):.1f} % more"


def differences(old: Result, new: Result) -> list[str]:
    """Describe each difference of machine, torch and workload between the two results."""
    before, after = dict(old.workload), dict(new.workload)
    for work in (before, after):
        work.setdefault("model", "gpt")  # results without this field are all of gpt
    names = [name for name in sorted({*before, *after}) if name not in _LENGTH_FIELDS]
    return [
        *_unlike(old.environment, new.environment, _MACHINE_FIELDS),
        *(f"workload: {line}" for line in _unlike(before, after, names)),
    ]


def packages(old: Result, new: Result) -> list[str]:
    """Describe each version that differs, of actstore and of the packages that the rows use."""
    names = sorted(
        {*old.environment, *new.environment} - {*_MACHINE_FIELDS, "time", "memory_bytes", "gpu_memory_bytes"}
    )
    return _unlike(old.environment, new.environment, names)


def _unlike(old: dict[str, Any], new: dict[str, Any], names: Any) -> list[str]:
    return [f"{name} {old.get(name)} and {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def changes(old: Result, new: Result) -> list[Change]:
    """Return the rows that both results have, in the order of `new`."""
    before = {row.name: row for row in old.rows}
    return [_change(before[row.name], row) for row in new.rows if row.name in before]


def only(one: Result, other: Result) -> list[str]:
    """Return the names of rows that only `one` has."""
    names = {row.name for row in other.rows}
    return [row.name for row in one.rows if row.name not in names]


def _change(old: RowResult, new: RowResult) -> Change:
    worse = ""
    if new.failed and not old.failed:
        worse = f"fails now: {new.failed}"
    elif old.bit_equal and new.bit_equal is False:
        worse = f"was exact, and has a gradient error of {new.grad_error:.2e}"
    return Change(old, new, None if new.kind == "plain" else time_growth(old, new), _held(old, new), worse)


def time_growth(old: RowResult, new: RowResult) -> Growth | None:
    """Return the ratio of the medians of the pairs, with the interval from resampled pairs."""
    return growth(old.pairs, new.pairs) if old.pairs and new.pairs else None


def growth(old: Sequence[float], new: Sequence[float]) -> Growth:
    """Return the ratio of two medians, with the interval from resampled samples."""
    before, after = np.array(old), np.array(new)
    generator = np.random.default_rng(0)
    medians = [
        np.median(generator.choice(samples, (BOOTSTRAP_DRAWS, samples.size)), axis=1) for samples in (before, after)
    ]
    low, high = np.quantile(medians[1] / medians[0], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Growth(float(low), float(np.median(after) / np.median(before)), float(high))


def _held(old: RowResult, new: RowResult) -> Growth | None:
    """Return the growth of held bytes; of a row that moves payloads, less the bytes that may be in transit."""
    if not old.held_bytes or new.held_bytes is None:
        return None
    chance = IN_TRANSIT_SHARE * (new.saved_bytes or 0) if "@" in new.policy else 0.0
    low, high = (max(0.0, new.held_bytes + sign * chance) / old.held_bytes for sign in (-1, 1))
    return Growth(low, new.held_bytes / old.held_bytes, high)


WRONG_GRAD_ERROR = 0.1
"""Relative gradient error that rounding cannot explain: a peer without a codec is wrong above it."""
ROUNDING_GRAD_ERROR = 1e-6
"""Relative gradient error up to which only the order of sums differs, as under a compiler: it decides nothing."""
GRAD_ERROR_NOISE = 0.01
"""Relative difference of gradient errors up to which two rows err alike, as two compilations of one model do."""
RATIO_NOISE = 0.05
"""Relative difference of two rows' times plain that a busy machine makes: which is faster is then tried."""
MOST_NEAR = 3  # rows that are tried
HELD_NOISE = 1e-3
"""Relative difference of held bytes up to which two rows hold the same: blocks of the allocator, nodes of graphs."""
PLANNED_SHARES = (0.2, 0.95)
"""Shares of plain's saved bytes between which a peer duels with a plan of its own bytes."""
PEAK_OVER_HELD = 1.1
"""Peak of a step over what is held when forward ends, which the budget of a compiled plan admits."""


def plans(rows: Sequence[RowResult]) -> list[Row]:
    """Return plans whose budgets are the bytes of each exact peer, in the graph for a peer that compiles."""
    found = []
    for peer in rows:
        if peer.kind != "peer" or not peer.held_bytes or not peer.saved_bytes or peer.grad_error is None:
            continue
        share, compiled = peer.held_bytes / peer.saved_bytes, peer.name in COMPILERS
        exact = peer.grad_error <= ROUNDING_GRAD_ERROR
        if compiled or (exact and PLANNED_SHARES[0] < share < PLANNED_SHARES[1]):
            found.append(plan(math.floor(1000 * share * (PEAK_OVER_HELD if compiled else 1)) / 1000, compiled))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Versus:
    """Outcome of one peer.

    Attributes
    ----------
    peer : name of its row
    ours : fastest row of actstore that holds at most as many bytes, but for `HELD_NOISE`, and is as exact; empty
        without one
    times : time of that row over time of the peer: from steps in turns where they had a duel, else from both ratios to
        plain, between which the speed of the machine may have changed
    low, high : 95 % interval of `times`, by a bootstrap over the pairs of steps
    pairs : number of pairs in the duel; 0 without a duel
    near : names of the fastest rows that compare, at most `MOST_NEAR`, which `RATIO_NOISE` may have put in this order
    reason : why no row, or no faster row, was found
    """

    peer: str
    ours: str = ""
    times: float | None = None
    low: float = 0.0
    high: float = 0.0
    pairs: int = 0
    near: tuple[str, ...] = ()
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Verdict: faster, slower, or as fast where neither is certain. Empty where no row of actstore compares."""
        if self.times is None:
            return ""
        return "faster" if self.high < 1 else "slower" if self.low > 1 else "as fast"


def versus(rows: Sequence[RowResult], duels: Sequence[Duel] = ()) -> list[Versus]:
    """Compare each peer among `rows`, in their order; use its duel where that was with a row that still compares."""
    ours = [row for row in rows if row.kind == "ours" and not row.failed]
    fought = {duel.peer: duel for duel in duels}
    return [_against(peer, ours, fought) for peer in rows if peer.kind == "peer"]


def as_exact(mine: RowResult, peer: RowResult) -> bool:
    """Return whether `mine` has plain's gradients bit for bit where the peer has them, else no larger an error."""
    if peer.bit_equal or mine.bit_equal:
        return bool(mine.bit_equal)
    if mine.grad_error is None or peer.grad_error is None:
        return False
    return mine.grad_error <= max((1 + GRAD_ERROR_NOISE) * peer.grad_error, ROUNDING_GRAD_ERROR)


def _against(peer: RowResult, ours: list[RowResult], duels: dict[str, Duel]) -> Versus:
    if peer.failed:
        return Versus(peer.name, reason=f"it failed: {peer.failed}")
    if (peer.grad_error or 0.0) > WRONG_GRAD_ERROR and peer.name != BITSANDBYTES.name:
        return Versus(peer.name, reason=f"its gradients are wrong, by {100 * (peer.grad_error or 0.0):.0f} %")
    if peer.held_bytes is None or not peer.ratio:
        return Versus(peer.name, reason="its bytes or its time could not be had")
    small = [row for row in ours if row.held_bytes is not None and row.held_bytes <= (1 + HELD_NOISE) * peer.held_bytes]
    fit = [row for row in small if row.ratio and as_exact(row, peer)]
    if not fit:
        if not small:
            return Versus(peer.name, reason="none of our rows holds as little")
        return Versus(peer.name, reason="none of our rows that hold as little is as exact")
    fit.sort(key=lambda row: row.ratio or 0.0)
    near = tuple(row.name for row in fit[:MOST_NEAR] if (row.ratio or 0.0) <= (1 + RATIO_NOISE) * (fit[0].ratio or 0.0))
    best, pairs, duel = fit[0], [], duels.get(peer.name)
    for row in fit:
        if duel is not None and row.name == duel.ours:
            best, pairs = row, duel.pairs
    times = growth([1.0], pairs) if pairs else time_growth(peer, best)
    if times is None:  # ratios without samples
        times = Growth(*[(best.ratio or 0.0) / peer.ratio] * 3)
    return Versus(peer.name, best.name, times.middle, times.low, times.high, len(pairs), near)
