"""Each peer against the best of our rows: the fastest that holds no more and is as exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actstore.bench.result import RowResult

ROUNDING = 1e-6
"""Gradient errors up to this come from the order of sums, as a compiler changes it; no peer beats another by them."""


@dataclass(frozen=True)
class Versus:
    """What became of one peer.

    Attributes
    ----------
    peer : its name
    ours : the fastest of our rows that holds at most as many bytes and is as exact; empty where there is none
    times : time of that row over time of the peer, both as multiples of plain steps beside them
    faster : whether that is below 1
    reason : why there is no row, or none that is faster
    """

    peer: str
    ours: str = ""
    times: float | None = None
    reason: str = ""

    @property
    def faster(self) -> bool:
        return self.times is not None and self.times < 1


def versus(rows: Sequence[RowResult]) -> list[Versus]:
    """Each peer among `rows`, in their order."""
    ours = [row for row in rows if row.kind == "ours" and not row.failed]
    return [_against(peer, ours) for peer in rows if peer.kind == "peer"]


def as_exact(mine: RowResult, peer: RowResult) -> bool:
    """Whether `mine` has plain's gradients, bit for bit, where the peer has them, or else no larger an error."""
    if peer.bit_equal or mine.bit_equal:
        return bool(mine.bit_equal)
    if mine.grad_error is None or peer.grad_error is None:
        return False
    return mine.grad_error <= max(peer.grad_error, ROUNDING)


def _against(peer: RowResult, ours: list[RowResult]) -> Versus:
    if peer.failed:
        return Versus(peer.name, reason=f"it failed: {peer.failed}")
    if peer.held_bytes is None or not peer.ratio:
        return Versus(peer.name, reason="its bytes or its time could not be had")
    small = [row for row in ours if row.held_bytes is not None and row.held_bytes <= peer.held_bytes]
    fit = {row.name: row.ratio / peer.ratio for row in small if row.ratio and as_exact(row, peer)}
    if not fit:
        if not small:
            return Versus(peer.name, reason="none of our rows holds as little")
        return Versus(peer.name, reason="none of our rows that hold as little is as exact")
    best = min(fit, key=lambda name: fit[name])
    return Versus(peer.name, best, fit[best], "" if fit[best] < 1 else "none of our rows that hold as little is faster")
