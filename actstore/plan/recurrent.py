"""The options of a unit that is called again and again in a step, as a recurrent cell is: schedules over its calls."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from actstore.plan.profile import Unit, UnitFigures
from actstore.plan.solver.chain import LayerOption
from actstore.plan.solver.revolve import advances

SHARES = 40  # of the calls: how finely a part of them can be recomputed
SEGMENT = 8  # calls that share one stored input, in the step that tells what an input takes
SLOTS = 8  # stored inputs in the step that tells what a replay costs that keeps few of the inputs that it meets
LEAST = 0.02  # of what recomputation holds: chains whose inputs are less are not worth a replay


def recurrent_options(unit: Unit, figures: dict[str, UnitFigures], keep: UnitFigures) -> Iterator[LayerOption]:
    """Recomputation of the first calls, of all of them, and of all with replayed inputs.

    Every call is taken to be alike. What an input from the call before takes is the difference that segments make. To
    look for its inputs takes a call of a chain about as long as a replay: few slots replay much, and look as often.
    """
    recompute, segments = figures.get("recompute"), figures.get(segments_of(SEGMENT))
    if recompute is None:
        return
    calls = unit.calls
    saved, stored = keep.total("held") / calls, recompute.total("held") / calls
    forward = max(recompute.forward - keep.forward, recompute.work_forward)
    backward = max(recompute.backward - keep.backward, recompute.work_backward)

    def option(decision: str, held: float, peak: float, replays: float = 0.0, share: float = 1.0) -> LayerOption:
        known = figures.get(decision)  # it has run
        return LayerOption(
            decision,
            held,
            forward=share * forward + (linking if replays else 0.0) if known is None else _more(known, keep, "forward"),
            backward=share * backward + (replays and (replays + calls) * replay)
            if known is None
            else _more(known, keep, "backward"),
            forward_peak=held,
            backward_peak=max(held, peak),
        )

    replay = linking = 0.0  # milliseconds of one replay, and of the bookkeeping for all of them in forward
    for part in range(1, SHARES):
        first = calls * part // SHARES
        if first:
            held = first * stored + (calls - first) * saved
            yield option(f"recompute(first={first})", held, first * stored + saved, share=first / calls)
    yield option("recompute", calls * stored, calls * stored + saved)
    if segments is None or calls < 2 * SEGMENT:
        return
    chained = (recompute.total("held") - segments.total("held")) / (calls - ceil(calls / SEGMENT))
    if chained <= LEAST * stored:
        return
    linking = max(0.0, segments.forward - recompute.forward)
    outside = calls * (stored - chained)
    replay = max(segments.backward - recompute.backward, keep.forward) / (2 * calls - ceil(calls / SEGMENT))
    length = 2
    while length <= calls // 2:
        held = outside + (ceil(calls / length) + 1) * chained
        replays = calls - ceil(calls / length)
        yield option(segments_of(length), held, held + length * chained + saved, replays)
        length *= 2
    revolve = figures.get(revolve_of(SLOTS))
    if revolve is not None:
        linking = max(0.0, revolve.forward - recompute.forward)
        replay = max(revolve.backward - recompute.backward, keep.forward / 2) / (advances(calls, SLOTS) + 1)
    slots = 2
    while slots < calls // 2:
        held = outside + (slots + 1) * chained
        replays = advances(calls, slots) - (calls - 1)
        yield option(revolve_of(slots), held, held + chained + saved, replays)
        slots = ceil(1.5 * slots)


def _more(figures: UnitFigures, keep: UnitFigures, direction: str) -> float:
    """What a decision that was measured adds in "forward" or "backward"."""
    difference: float = getattr(figures, direction) - getattr(keep, direction)
    work: float = getattr(figures, f"work_{direction}")
    return max(difference, work)


def segments_of(length: int) -> str:
    return f"recompute(segment={length})"


def revolve_of(slots: int) -> str:
    return f"recompute(schedule=revolve, slots={slots})"
