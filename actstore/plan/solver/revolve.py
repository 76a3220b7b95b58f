"""The Revolve schedule: the fewest forwards that recompute the states of a chain of equal steps, last one first.

A chain of `length` steps is reversed with `slots` stored states. One slot holds the state before the first step; the
state that the sweep has arrived at is live and takes no slot. By Griewank and Walther (2000), with
beta(c, r) = (c + r)! / (c! r!), r the number with beta(c, r - 1) < l <= beta(c, r), the sweeps advance

    t(l, c) = r l - beta(c + 1, r - 1)

steps. This counts the first sweep over the chain, but not the run of each step that records it for its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import comb

MAX_AUTO_ADVANCES = 2  # average forwards of a step that `fewest_slots` allows, beyond the one that records it


def beta(slots: int, repetitions: int) -> int:
    """Return the longest chain for `slots` where the sweeps advance over each step at most `repetitions` times."""
    return comb(slots + repetitions, slots) if repetitions >= 0 else 0


@cache
def repetitions(length: int, slots: int) -> int:
    """Return the most times that the sweeps advance over a step."""
    r = 0
    while beta(slots, r) < length:
        r += 1
    return r


def advances(length: int, slots: int) -> int:
    """Return the number of steps that all sweeps advance over, t(l, c): the least possible.

    Parameters
    ----------
    length, slots : 1 or more

    Raises
    ------
    ValueError : less than one step or slot
    """
    if length < 1 or slots < 1:
        raise ValueError(f"a chain of {length} steps with {slots} slots cannot be reversed. Give 1 or more of each.")
    r = repetitions(length, slots)
    return r * length - beta(slots + 1, r - 1)


@cache
def split(length: int, slots: int) -> int:
    """Return the step before which an optimal sweep first stores a state: the least j with the least
    j + t(l - j, c - 1) + t(j, c). For `length` and `slots` of 2 or more.
    """
    low, high = 1, length - 1  # convex in j: t grows by `repetitions(l + 1, c)` from l to l + 1
    while low < high:
        j = (low + high) // 2
        if 1 + repetitions(j + 1, slots) >= repetitions(length - j, slots - 1):
            high = j
        else:
            low = j + 1
    return low


def positions(length: int, slots: int) -> Iterator[int]:
    """Yield the steps before which a sweep to the last step of a chain stores the state, ascending.

    Step 0, which takes one of the slots, and the last step, whose state is live, are left out.
    """
    at = 0
    while slots > 1 and length > 2:
        j = split(length, slots)
        if j == length - 1:
            return
        at += j
        yield at
        length, slots = length - j, slots - 1


@cache
def fewest_slots(length: int) -> int:
    """Return the fewest slots with which sweeps after the first advance over few enough steps.

    Few enough is fewer than `MAX_AUTO_ADVANCES` steps for each step of the chain. More slots than that do not pay:
    1,000 steps take 16 slots; an allowance of 1.5 would take 30 slots, one of 3 would take 10.
    """
    slots = 1
    while advances(length, slots) - (length - 1) >= MAX_AUTO_ADVANCES * length:
        slots += 1
    return slots
