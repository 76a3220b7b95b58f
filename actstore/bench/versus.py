"""Each peer against the best of our rows: the fastest that holds no more and is as exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actstore.bench.comparison import Growth, growth, time_growth
from actstore.bench.peers.rows import BITSANDBYTES
from actstore.bench.result import Duel, RowResult

WRONG = 0.1
"""A gradient error from here on is none of rounding: a peer that encodes nothing does not train this model."""
ROUNDING = 1e-6
"""Gradient errors up to this come from the order of sums, as a compiler changes it; no peer beats another by them."""


@dataclass(frozen=True)
class Versus:
    """What became of one peer.

    Attributes
    ----------
    peer : its name
    ours : the fastest of our rows that holds at most as many bytes and is as exact; empty where there is none
    times : time of that row over time of the peer: of steps in turns where they had a duel, or else both as multiples
        of plain steps beside them, though the speed of the machine may have changed from one to the other
    low, high : where that lies with 95 %, by a bootstrap over the pairs of steps
    pairs : of steps in a duel; 0 where there was none
    reason : why there is no row, or none that is faster
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
        """Ours is faster, slower, or as fast: neither is certain. Empty where none of ours is there."""
        if self.times is None:
            return ""
        return "faster" if self.high < 1 else "slower" if self.low > 1 else "as fast"


def versus(rows: Sequence[RowResult], duels: Sequence[Duel] = ()) -> list[Versus]:
    """Each peer among `rows`, in their order, with what its duel says where it had one with the row that is chosen."""
    ours = [row for row in rows if row.kind == "ours" and not row.failed]
    fought = {(duel.peer, duel.ours): duel.pairs for duel in duels}
    return [_against(peer, ours, fought) for peer in rows if peer.kind == "peer"]


def as_exact(mine: RowResult, peer: RowResult) -> bool:
    """Whether `mine` has plain's gradients, bit for bit, where the peer has them, or else no larger an error."""
    if peer.bit_equal or mine.bit_equal:
        return bool(mine.bit_equal)
    if mine.grad_error is None or peer.grad_error is None:
        return False
    return mine.grad_error <= max(peer.grad_error, ROUNDING)


def _against(peer: RowResult, ours: list[RowResult], duels: dict[tuple[str, str], list[float]]) -> Versus:
    if peer.failed:
        return Versus(peer.name, reason=f"it failed: {peer.failed}")
    if (peer.grad_error or 0.0) > WRONG and peer.name != BITSANDBYTES.name:
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
    if times is None:  # there are no pairs, only ratios
        times = Growth(*[(best.ratio or 0.0) / peer.ratio] * 3)
    return Versus(peer.name, best.name, times.middle, times.low, times.high, len(pairs))
