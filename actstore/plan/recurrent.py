"""The options of a unit that runs several times in a step, as a recurrent cell does: schedules over its calls."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from actstore.plan.decisions import RECOMPUTE
from actstore.plan.profile import Unit, UnitFigures
from actstore.plan.solver.chain import LayerOption
from actstore.plan.solver.revolve import advances

SHARE_STEPS = 40  # options recompute multiples of 1/40 of the calls
PROBE_SEGMENT = 8  # calls that share one stored input, in the step that measures the bytes of an input
PROBE_SLOTS = 8  # stored inputs, in the step that measures the time of a replay with few stored inputs
MIN_CHAINED_SHARE = 0.02  # of the bytes that recompute holds: chains with smaller inputs are not worth a replay


def recurrent_options(unit: Unit, figures: dict[str, UnitFigures], keep: UnitFigures) -> Iterator[LayerOption]:
    """Yield the options to recompute the first calls, all calls, and all calls with replayed inputs.

    All calls are assumed to be alike. The bytes of an input from the previous call are the difference that segments
    make. The search for its inputs takes a call of a chain about as long as a replay: few slots replay much, and search
    as often.
    """
    recompute, segments = figures.get(RECOMPUTE), figures.get(segments_of(PROBE_SEGMENT))
    if recompute is None:
        return
    calls = unit.calls
    saved, stored = keep.total("held") / calls, recompute.total("held") / calls
    forward = max(recompute.forward - keep.forward, recompute.work_forward)
    backward = max(recompute.backward - keep.backward, recompute.work_backward)

    def option(decision: str, held: float, peak: float, replays: float = 0.0, share: float = 1.0) -> LayerOption:
        known = figures.get(decision)  # measured figures, if the decision has run
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
    for part in range(1, SHARE_STEPS):
        first = calls * part // SHARE_STEPS
        if first:
            held = first * stored + (calls - first) * saved
            yield option(f"recompute(first={first})", held, first * stored + saved, share=first / calls)
    yield option(RECOMPUTE, calls * stored, calls * stored + saved)
    if segments is None or calls < 2 * PROBE_SEGMENT:
        return
    chained = (recompute.total("held") - segments.total("held")) / (calls - ceil(calls / PROBE_SEGMENT))
    if chained <= MIN_CHAINED_SHARE * stored:
        return
    linking = max(0.0, segments.forward - recompute.forward)
    outside = calls * (stored - chained)
    replay = max(segments.backward - recompute.backward, keep.forward) / (2 * calls - ceil(calls / PROBE_SEGMENT))
    length = 2
    while length <= calls // 2:
        held = outside + (ceil(calls / length) + 1) * chained
        replays = calls - ceil(calls / length)
        yield option(segments_of(length), held, held + length * chained + saved, replays)
        length *= 2
    revolve = figures.get(revolve_of(PROBE_SLOTS))
    if revolve is not None:
        linking = max(0.0, revolve.forward - recompute.forward)
        replay = max(revolve.backward - recompute.backward, keep.forward / 2) / (advances(calls, PROBE_SLOTS) + 1)
    slots = 2
    while slots < calls // 2:
        held = outside + (slots + 1) * chained
        replays = advances(calls, slots) - (calls - 1)
        yield option(revolve_of(slots), held, held + chained + saved, replays)
        slots = ceil(1.5 * slots)


def _more(figures: UnitFigures, keep: UnitFigures, direction: str) -> float:
    """Return the time that a measured decision adds in "forward" or "backward"."""
    difference: float = getattr(figures, direction) - getattr(keep, direction)
    work: float = getattr(figures, f"work_{direction}")
    return max(difference, work)


def segments_of(length: int) -> str:
    return f"recompute(segment={length})"


def revolve_of(slots: int) -> str:
    return f"recompute(schedule=revolve, slots={slots})"
