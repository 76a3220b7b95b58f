"""A fixture: whatever a test reserves it must free."""

from __future__ import annotations

import pytest

from actstore.base.ledger import Ledger
from actstore.tiers import BufferPool, DeviceTier
from actstore.tiers.arena import Arena
from actstore.tiers.base import Limited
from actstore.tiers.disk import DiskTier
from actstore.tiers.host import HostTier
from actstore.transfer import Engine


@pytest.fixture(autouse=True)
def all_freed(monkeypatch):
    """Fail unless every pool is unused, every slot free and every flight landed at the end of the test."""
    made = {Arena: [], BufferPool: [], Limited: [], Engine: [], Ledger: []}
    slots = {}

    def watch_made(cls):
        init = cls.__init__

        def watched(self, *args, **kwargs):
            init(self, *args, **kwargs)
            made[cls].append(self)

        monkeypatch.setattr(cls, "__init__", watched)

    def watch_slots(cls):
        reserve, free = cls.reserve, cls.free

        def watched_reserve(self, nbytes):
            slot = reserve(self, nbytes)
            if slot is not None and not self.on_device:  # else its death frees it
                slots[id(self), id(slot)] = slot
            return slot

        def watched_free(self, slot):
            free(self, slot)
            slots.pop((id(self), id(slot)), None)

        monkeypatch.setattr(cls, "reserve", watched_reserve)
        monkeypatch.setattr(cls, "free", watched_free)

    for cls in made:
        watch_made(cls)
    for cls in (DeviceTier, DiskTier, HostTier, Limited):
        watch_slots(cls)
    yield
    assert not slots, f"{len(slots)} slots were not freed"
    for ledger in made[Ledger]:
        ledger.settle()
    assert [pool.used_nbytes for pool in made[BufferPool] + made[Arena] if pool.used_nbytes] == []
    for tier in made[Limited]:
        tier._back.drain()
        assert tier._used_nbytes == 0
    for engine in made[Engine]:
        engine.poll()
        assert traffic(engine) == {}


def traffic(engine):
    """What an engine still has on its way, by name; empty when all is at rest."""
    found = {
        "open parcels": len(engine._traffic.open),
        "bytes in windows": sum(window.nbytes for window in engine._traffic.quota.windows.values()),
        "flights": sum(len(window.flights) for window in engine._traffic.quota.windows.values()),
        "bytes that wait": engine._traffic.quota.nbytes,
        "open runs": len(engine._traffic.quota.runs),
        "bytes fetched ahead": engine._traffic.quota.lookahead.nbytes,
        "parcels ready": len(engine._traffic.ready),
        "buffers": engine._traffic.buffers.used_nbytes,
        "buffers in other hands": len(engine._traffic.leaving),
    }
    return {name: count for name, count in found.items() if count}
