"""Turns of a step: where several micro-batches wait, each begins a backward of its own.

In a pipeline with several stages on one rank, the units of one stage hold most at another turn than those of the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_TURNS = 4  # that a plan considers one by one


def calls_at_turns(
    first: Mapping[str, int], calls: Mapping[str, int], held: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """Return how many calls of each unit waited at each turn.

    Parameters
    ----------
    first : the calls of units that waited at the first turn
    calls : all calls
    held : bytes of units at each turn, which grow and shrink with the calls that wait
    """
    number = max(map(len, held.values()), default=1)
    found: dict[str, list[int]] = {}
    for name in [name for name in first if name in calls]:
        nbytes = held.get(name, [0] * number)
        most = max(nbytes)
        growth = most / nbytes[0] if nbytes[0] else 1.0
        waiting = min(calls[name], max(1, round(growth * first[name])))
        found[name] = [round(waiting * each / most) if most else waiting for each in nbytes]
    return found


def largest_turns(columns: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Return the turns at which no other one has at least as many calls of each unit, at most `MAX_TURNS`."""
    names = sorted({name for column in columns for name in column})  # ranks that plan alike need one order
    rows = sorted({tuple(column.get(name, 0) for name in names) for column in columns}, reverse=True)
    rows.sort(key=sum, reverse=True)
    kept: list[tuple[int, ...]] = []
    for row in rows:
        if not any(all(a >= b for a, b in zip(other, row, strict=True)) for other in kept):
            kept.append(row)
    if len(kept) > MAX_TURNS:  # the last ones as one turn that has the most of them all
        kept[MAX_TURNS - 1 :] = [tuple(map(max, *kept[MAX_TURNS - 1 :]))]
    return [dict(zip(names, row, strict=True)) for row in kept]
