"""What every tier promises, checked on one: the same bytes back, refusal as a value, threads, the end."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from actstore.errors import StateError
from actstore.tiers import Slot, Tier

SIZES = (0, 1, 15, 4095, 4096, 4097, 100_003)


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def store(tier: Tier, payload: torch.Tensor) -> Slot:
    """Reserve and write, then destroy the source as soon as the ticket allows it."""
    slot = tier.reserve(payload.numel())
    assert slot is not None
    assert slot.nbytes == payload.numel()
    source = payload.clone()
    ticket = tier.write(slot, source)
    ticket.wait_on(None)
    assert ticket.ready()
    source.fill_(0xA5)
    return slot


def load(tier: Tier, slot: Slot) -> torch.Tensor:
    found = torch.full((slot.nbytes,), 0x5A, dtype=torch.uint8)
    tier.read(slot, found).wait_on(None)
    return found


def check_tier(tier: Tier) -> None:
    check_bytes(tier)
    check_rooms_are_apart(tier)
    check_threads(tier)
    check_close(tier)


def check_bytes(tier: Tier) -> None:
    for nbytes in SIZES:
        payload = pattern(nbytes, nbytes)
        slot = store(tier, payload)
        for _ in range(2):
            assert torch.equal(load(tier, slot), payload)
        tier.free(slot)
        tier.trim()


def check_rooms_are_apart(tier: Tier) -> None:
    """No write reaches another slot, also not one in room that was freed."""
    slots = {}
    for i in range(30):
        slots[i] = store(tier, pattern(SIZES[i % len(SIZES)] + i, i))
        if i % 3 == 2:
            tier.free(slots.pop(i - 1))
    for i, slot in slots.items():
        assert torch.equal(load(tier, slot), pattern(slot.nbytes, i))
    if all(slot.buffer is not None for slot in slots.values()):
        spans = sorted((slot.buffer.data_ptr(), slot.nbytes) for slot in slots.values() if slot.nbytes)
        assert all(start + nbytes <= after for (start, nbytes), (after, _) in pairwise(spans))
    for slot in slots.values():
        tier.free(slot)


def check_threads(tier: Tier) -> None:
    def work(seed: int) -> None:
        for i in range(20):
            payload = pattern(1000 + 37 * ((seed + i) % 5), 100 * seed + i)
            slot = store(tier, payload)
            if i % 5 == 0:
                gc.collect(0)
            if i % 4 == 3:
                tier.trim()
            assert torch.equal(load(tier, slot), payload)
            tier.free(slot)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def check_close(tier: Tier) -> None:
    late = tier.reserve(5000)
    assert late is not None
    tier.close()
    tier.close()
    with pytest.raises(StateError):
        tier.reserve(1)
    tier.free(late)
    tier.trim()
