"""How fast payloads leave the compute device and come back, measured with the tiers themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import perf_counter_ns

from actstore.base.ticket import Ticket
from actstore.plan.solver.chain import Links
from actstore.store.tierset import TierSet
from actstore.tiers import Slot

CHUNK = 16 * 2**20
CHUNKS = 8
UNLIMITED = inf, inf, 1.0


def measure_links(place: TierSet, *, host: bool, disk: bool) -> Links:
    """The rates of the tiers that may be used, in bytes per millisecond: some 128 MiB go each way, then half of that
    both ways at once.

    A tier without room for that is measured with what it has, and left at an infinite rate where it has none: then
    nothing can wait there either.
    """
    on_host = place.device.on_host
    out, back, both_ways = _rates(place, "host") if host and not on_host else UNLIMITED
    disk_out, disk_back, disk_both_ways = _rates(place, "disk") if disk else UNLIMITED
    return Links(out, back, disk_out, disk_back, on_host, both_ways, disk_both_ways)


def _rates(place: TierSet, name: str) -> tuple[float, float, float]:
    """Bytes per millisecond to a tier and back, as many chunks at once as the tier takes, and what each direction keeps
    of that while the other one runs."""
    device, tier = place.device, place.tier(name)
    buffer = device.empty(CHUNK).zero_()
    slots: list[Slot] = []
    try:
        while len(slots) < CHUNKS and (slot := place.reserve(name, CHUNK)) is not None:
            slots.append(slot)
        if not slots:
            return UNLIMITED
        buffers = {slot: device.empty(CHUNK) for slot in slots}

        def write(slot: Slot) -> Ticket:
            slot.written = tier.write(slot, buffer, [device.record(device.current())])
            return slot.written

        def read(slot: Slot) -> Ticket:
            return tier.read(slot, buffers[slot], [device.record(device.current())])

        writes, reads = ([partial(copy, slot) for slot in slots] for copy in (write, read))
        _time(writes)  # the file grows, pages are pinned
        out, back = _time(writes), _time(reads)
        half = len(slots) // 2
        both = _time([start for pair in zip(writes[:half], reads[half:], strict=False) for start in pair])
        part = half / len(slots)
        return CHUNK * len(slots) / out, CHUNK * len(slots) / back, share_kept(part * out, part * back, both)
    finally:
        for slot in slots:
            slot.tier.free(slot)


def _time(starts: Sequence[Callable[[], Ticket]]) -> float:
    """Milliseconds until all that is started has ended."""
    begin = perf_counter_ns()
    for ticket in [start() for start in starts]:
        ticket.result()
    return max(1, perf_counter_ns() - begin) / 1e6


def share_kept(out: float, back: float, both: float) -> float:
    """The part of its rate that each direction keeps while the other one runs.

    Parameters
    ----------
    out, back : milliseconds of each alone
    both : of the two at once: the longer one ends alone, at its full rate
    """
    shorter, alone = min(out, back), abs(out - back)
    return min(1.0, shorter / (both - alone)) if both > alone and shorter else 1.0
