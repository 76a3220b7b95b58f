"""Transfer rates between the compute device and the tiers, measured with the tiers themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from statistics import median
from time import perf_counter_ns

from actstore.base.ticket import Ticket
from actstore.plan.solver.chain import Links
from actstore.store.tierset import TierSet
from actstore.tiers import Slot

CHUNK_NBYTES = 16 * 2**20
MAX_CHUNKS = 8
UNLIMITED = inf, inf, 1.0


def measure_links(place: TierSet, *, host: bool, disk: bool) -> Links:
    """Return the rates of the usable tiers, in bytes per millisecond.

    Up to 128 MiB go each way, then half of that both ways at once. A tier with less room is measured with that room.
    A tier without room gets an infinite rate: no payload can wait there.
    """
    on_host = place.device.on_host
    out, back, both_ways = _rates(place, "host") if host and not on_host else UNLIMITED
    disk_out, disk_back, disk_both_ways = _rates(place, "disk") if disk else UNLIMITED
    return Links(out, back, disk_out, disk_back, on_host, both_ways, disk_both_ways)


def _rates(place: TierSet, name: str) -> tuple[float, float, float]:
    """Return the rates to a tier and back, in bytes per millisecond, and the share of each kept while both run."""
    device, tier = place.device, place.tier(name)
    buffer = device.empty(CHUNK_NBYTES).zero_()
    with _reserved(place, name, CHUNK_NBYTES) as slots:
        if not slots:
            return UNLIMITED
        buffers = {slot: device.empty(CHUNK_NBYTES) for slot in slots}

        def write(slot: Slot) -> Ticket:
            slot.written = tier.write(slot, buffer, [device.record(device.current())])
            return slot.written

        def read(slot: Slot) -> Ticket:
            return tier.read(slot, buffers[slot], [device.record(device.current())])

        writes, reads = ([partial(copy, slot) for slot in slots] for copy in (write, read))
        _time(writes)  # warm-up: the file grows, pages are pinned
        out, back = _time(writes), _time(reads)
        half = len(slots) // 2
        both = _time([start for pair in zip(writes[:half], reads[half:], strict=False) for start in pair])
        part = half / len(slots)
        nbytes = CHUNK_NBYTES * len(slots)
        return nbytes / out, nbytes / back, share_kept(part * out, part * back, both)


def rates_alone(place: TierSet, name: str, nbytes: int) -> tuple[float, float] | None:
    """Return the rates to a tier and back, in bytes per millisecond, of payloads that are copied one after the other.

    Each has memory of its own, which is in no cache of a processor. None for a tier without room.
    """
    device, tier = place.device, place.tier(name)
    with _reserved(place, name, nbytes) as slots:
        if not slots:
            return None
        buffers = {slot: device.empty(nbytes).zero_() for slot in slots}

        def rate(copy: Callable[..., Ticket]) -> float:
            """Return the second round's rate: in the first round the file grows, and pages are pinned."""
            starts = [partial(copy, slot, buffers[slot], [device.record(device.current())]) for slot in slots]
            return nbytes / [median(_time([start]) for start in starts) for _ in range(2)][-1]

        return rate(tier.write), rate(tier.read)


@contextmanager
def _reserved(place: TierSet, name: str, nbytes: int) -> Iterator[list[Slot]]:
    """Reserve up to `MAX_CHUNKS` slots of a tier, as many as there is room for, inside the context."""
    slots: list[Slot] = []
    try:
        while len(slots) < MAX_CHUNKS and (slot := place.reserve(name, nbytes)) is not None:
            slots.append(slot)
        yield slots
    finally:
        for slot in slots:
            slot.tier.free(slot)


def _time(starts: Sequence[Callable[[], Ticket]]) -> float:
    """Start all copies, and return the milliseconds until the last has ended."""
    begin = perf_counter_ns()
    for ticket in [start() for start in starts]:
        ticket.result()
    return max(1, perf_counter_ns() - begin) / 1e6


def share_kept(out: float, back: float, both: float) -> float:
    """Return the share of its rate that each direction keeps while the other one runs.

    Parameters
    ----------
    out, back : milliseconds of each direction alone
    both : milliseconds of the two at once: the longer one ends alone, at its full rate
    """
    shorter, alone = min(out, back), abs(out - back)
    return min(1.0, shorter / (both - alone)) if both > alone and shorter else 1.0
