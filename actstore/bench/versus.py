"""Comparison of each peer with the fastest row of actstore that holds no more and is as exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actstore.bench.comparison import Growth, growth, time_growth
from actstore.bench.peers.rows import BITSANDBYTES
from actstore.bench.result import Duel, RowResult

WRONG_GRAD_ERROR = 0.1
"""Relative gradient error that rounding cannot explain: a peer without a codec is wrong above it."""
ROUNDING_GRAD_ERROR = 1e-6
"""Relative gradient error up to which only the order of sums differs, as under a compiler: it decides nothing."""


@dataclass(frozen=True)
class Versus:
    """Outcome of one peer.

    Attributes
    ----------
    peer : name of its row
    ours : fastest row of actstore that holds at most as many bytes and is as exact; empty without one
    times : time of that row over time of the peer: from steps in turns where they had a duel, else from both ratios to
        plain, between which the speed of the machine may have changed
    low, high : 95 % interval of `times`, by a bootstrap over the pairs of steps
    pairs : number of pairs in the duel; 0 without a duel
    reason : why no row, or no faster row, was found
    """

    peer: str
    ours: str = ""
    times: float | None = None
    low: float = 0.0
    high: float = 0.0
    pairs: int = 0
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Verdict: faster, slower, or as fast where neither is certain. Empty where no row of actstore compares."""
        if self.times is None:
            return ""
        return "faster" if self.high < 1 else "slower" if self.low > 1 else "as fast"


def versus(rows: Sequence[RowResult], duels: Sequence[Duel] = ()) -> list[Versus]:
    """Compare each peer among `rows`, in their order; use the duel with the chosen row where there is one."""
    ours = [row for row in rows if row.kind == "ours" and not row.failed]
    fought = {(duel.peer, duel.ours): duel.pairs for duel in duels}
    return [_against(peer, ours, fought) for peer in rows if peer.kind == "peer"]


def as_exact(mine: RowResult, peer: RowResult) -> bool:
    """Return whether `mine` has plain's gradients bit for bit where the peer has them, else no larger an error."""
    if peer.bit_equal or mine.bit_equal:
        return bool(mine.bit_equal)
    if mine.grad_error is None or peer.grad_error is None:
        return False
    return mine.grad_error <= max(peer.grad_error, ROUNDING_GRAD_ERROR)


def _against(peer: RowResult, ours: list[RowResult], duels: dict[tuple[str, str], list[float]]) -> Versus:
    if peer.failed:
        return Versus(peer.name, reason=f"it failed: {peer.failed}")
    if (peer.grad_error or 0.0) > WRONG_GRAD_ERROR and peer.name != BITSANDBYTES.name:
        return Versus(peer.name, reason=f"its gradients are wrong, by {100 * (peer.grad_error or 0.0):.0f} %")
    if peer.held_bytes is None or not peer.ratio:
        return Versus(peer.name, reason="its bytes or its time could not be had")
    small = [row for row in ours if row.held_bytes is not None and row.held_bytes <= peer.held_bytes]
    fit = [row for row in small if row.ratio and as_exact(row, peer)]
    if not fit:
        if not small:
            return Versus(peer.name, reason="none of our rows holds as little")
        return Versus(peer.name, reason="none of our rows that hold as little is as exact")
    best = min(fit, key=lambda row: row.ratio or 0.0)
    pairs = duels.get((peer.name, best.name), [])
    times = growth([1.0], pairs) if pairs else time_growth(peer, best)
    if times is None:  # ratios without samples
        times = Growth(*[(best.ratio or 0.0) / peer.ratio] * 3)
    return Versus(peer.name, best.name, times.middle, times.low, times.high, len(pairs))
