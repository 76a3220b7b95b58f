"""Bytes of a step in which several micro-batches wait for backward at once, and each unit's calls at each turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def share_at(turns: Sequence[int], number: int) -> float:
    """Return the share of the most calls of a unit that wait at a turn; 1 where `turns` tells nothing of the unit."""
    return turns[number] / max(turns) if turns and max(turns) else 1.0


def most_at_once(held: Iterable[tuple[float, Sequence[int]]]) -> float:
    """Return the most bytes that units hold at one turn.

    Parameters
    ----------
    held : for each unit the bytes while most of its calls wait, and how many wait at each turn
    """
    units = list(held)
    number = max((len(turns) for _, turns in units), default=0)
    return max(sum(nbytes * share_at(turns, i) for nbytes, turns in units) for i in range(max(1, number)))
