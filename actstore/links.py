"""How fast payloads leave the compute device and come back, measured with the tiers themselves."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import perf_counter_ns

from actstore.plan.chain import Links
from actstore.ticket import Ticket
from actstore.tiers import Slot
from actstore.tierset import TierSet

CHUNK = 16 * 2**20
CHUNKS = 8


def measure_links(place: TierSet, *, host: bool, disk: bool) -> Links:
    """The rates of the tiers that may be used, in bytes per millisecond; some 128 MiB go each way.

    A tier without room for that is measured with what it has, and left at an infinite rate where it has none: then
    nothing can wait there either.
    """
    on_host = place.device.on_host
    out, back = _rates(place, "host") if host and not on_host else (inf, inf)
    disk_out, disk_back = _rates(place, "disk") if disk else (inf, inf)
    return Links(out, back, disk_out, disk_back, on_host)


def _rates(place: TierSet, name: str) -> tuple[float, float]:
    """Bytes per millisecond to a tier and back, as many chunks at once as the tier takes."""
    device, tier = place.device, place.tier(name)
    buffer = device.empty(CHUNK).zero_()
    slots: list[Slot] = []
    try:
        while len(slots) < CHUNKS and (slot := place.reserve(name, CHUNK)) is not None:
            slots.append(slot)
        if not slots:
            return inf, inf
        buffers = [device.empty(CHUNK) for _ in slots]

        def write(slot: Slot) -> Ticket:
            slot.written = tier.write(slot, buffer, [device.record(device.current())])
            return slot.written

        def read(slot: Slot) -> Ticket:
            return tier.read(slot, buffers[slots.index(slot)], [device.record(device.current())])

        _time(slots, write)  # the file grows, pages are pinned
        return _time(slots, write), _time(slots, read)
    finally:
        for slot in slots:
            slot.tier.free(slot)


def _time(slots: list[Slot], start: Callable[[Slot], Ticket]) -> float:
    begin = perf_counter_ns()
    for ticket in [start(slot) for slot in slots]:
        ticket.result()
    return CHUNK * len(slots) / max(1, perf_counter_ns() - begin) * 1e6
