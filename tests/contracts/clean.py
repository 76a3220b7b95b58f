"""A fixture: whatever a test reserves it must free."""

from __future__ import annotations

import pytest

from actstore.tiers import BufferPool, DeviceTier, DiskTier, HostTier, Limited
from actstore.transfer import Transfer


@pytest.fixture(autouse=True)
def all_freed(monkeypatch):
    """Fail unless every pool is unused, every slot free and every flight landed at the end of the test."""
    made = {BufferPool: [], Transfer: []}
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
            if slot is not None:
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
    assert [pool.used_nbytes for pool in made[BufferPool] if pool.used_nbytes] == []
    assert [transfer._nbytes for transfer in made[Transfer] if transfer._nbytes or transfer._flights] == []
