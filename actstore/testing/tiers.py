"""Checks of the tier contract: the same bytes back, threads, work in flight, the end."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import torch

from actstore.devices import Cpu
from actstore.errors import StateError
from actstore.tiers import Slot, Tier

SIZES_NBYTES = (0, 1, 15, 4095, 4096, 4097, 100_003)


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def store(tier: Tier, payload: torch.Tensor) -> Slot:
    """Reserve and write, then destroy the source as soon as the ticket allows it."""
    slot = _reserve(tier, payload.numel())
    assert slot.nbytes == payload.numel(), f"reserve({payload.numel()}) made a slot of {slot.nbytes} bytes"
    source = payload.clone()
    ticket = tier.write(slot, source)
    ticket.wait_on(None)
    assert ticket.ready(), "the ticket of a write is not ready after wait_on(None)"
    source.fill_(0xA5)
    return slot


def load(tier: Tier, slot: Slot, nbytes: int | None = None) -> torch.Tensor:
    """Read the bytes of a slot, all or the first `nbytes`. Errors are those of the read's ticket."""
    found = torch.full((slot.nbytes if nbytes is None else nbytes,), 0x5A, dtype=torch.uint8)
    ticket = tier.read(slot, found)
    ticket.result()
    assert ticket.ready(), "the ticket of a read is not ready after result()"
    return found


def check_tier(tier: Tier) -> None:
    """Check every promise of `Tier` on a new one, which is closed at the end.

    Parameters
    ----------
    tier : made for the CPU (`Cpu(torch.device("cpu"))`), empty, with room for 2 MiB

    Raises
    ------
    AssertionError : a promise is broken
    """
    check_bytes(tier)
    check_pages(tier)
    check_short_payloads(tier)
    check_rooms_are_apart(tier)
    check_work_in_flight(tier)
    check_threads(tier)
    check_close(tier)


def check_bytes(tier: Tier) -> None:
    for nbytes in SIZES_NBYTES:
        assert tier.room(nbytes) >= nbytes, f"room({nbytes}) is {tier.room(nbytes)}"
        payload = pattern(nbytes, nbytes)
        slot = store(tier, payload)
        for _ in range(2):
            _require_equal(load(tier, slot), payload)
        tier.free(slot)
        tier.trim()


def check_pages(tier: Tier) -> None:
    """Check whole pages, which some tiers move in another way, in memory that begins at a page or does not."""
    cpu = Cpu(torch.device("cpu"))
    for nbytes in (4096, 5 * 4096):
        payload = pattern(nbytes, nbytes)
        for skipped in (0, 64):
            slot = _reserve(tier, nbytes)
            source, found = (cpu.empty(nbytes + skipped)[skipped:] for _ in range(2))
            source.copy_(payload)
            tier.write(slot, source).result()
            source.fill_(0xA5)
            tier.read(slot, found).result()
            _require_equal(found, payload)
            tier.free(slot)


def check_short_payloads(tier: Tier) -> None:
    """Check that a write may be shorter than the slot, and that a read may take only the beginning."""
    for nbytes in (0, 1, 4096, 4999):
        slot = _reserve(tier, 5000)
        payload = pattern(nbytes, nbytes)
        tier.write(slot, payload.clone()).result()
        _require_equal(load(tier, slot, nbytes), payload)
        tier.free(slot)


def check_rooms_are_apart(tier: Tier) -> None:
    """Check that no write reaches another slot, also not one in room that was freed."""
    slots = {}
    for i in range(30):
        slots[i] = store(tier, pattern(SIZES_NBYTES[i % len(SIZES_NBYTES)] + i, i))
        if i % 3 == 2:
            tier.free(slots.pop(i - 1))
    for i, slot in slots.items():
        _require_equal(load(tier, slot), pattern(slot.nbytes, i))
    buffers = [slot.buffer for slot in slots.values() if slot.buffer is not None and slot.nbytes]
    spans = sorted((buffer.data_ptr(), buffer.numel()) for buffer in buffers)
    assert all(start + nbytes <= after for (start, nbytes), (after, _) in pairwise(spans)), "two slots share memory"
    for slot in slots.values():
        tier.free(slot)


def check_work_in_flight(tier: Tier) -> None:
    """Check that the tier keeps the order of operations when the host never waits, also when it frees their slots."""
    kept = []
    for i in range(40):
        payload = pattern(5000 + 700 * (i % 3), i)
        slot = _reserve(tier, payload.numel())
        source, found = payload.clone(), torch.full_like(payload, 0x5A)
        written = tier.write(slot, source)
        read = tier.read(slot, found, (written,) if i % 2 else ())
        if i % 4 == 3:
            kept.append((slot, payload, source, found, read))
        else:
            tier.free(slot)
        if i % 8 == 7:
            tier.trim()
    for slot, payload, _, found, read in kept:
        read.result()
        _require_equal(found, payload)
        _require_equal(load(tier, slot), payload)
        tier.free(slot)


def check_threads(tier: Tier) -> None:
    """Check four threads at once, with runs of the garbage collector in between."""

    def work(seed: int) -> None:
        for i in range(20):
            payload = pattern(1000 + 37 * ((seed + i) % 5), 100 * seed + i)
            slot = store(tier, payload)
            if i % 5 == 0:
                gc.collect(0)
            if i % 4 == 3:
                tier.trim()
            _require_equal(load(tier, slot), payload)
            tier.free(slot)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def check_close(tier: Tier) -> None:
    """Check that a closed tier, also one closed twice or with work in flight, refuses work and takes back its slots."""
    late = [_reserve(tier, 5000) for _ in range(4)]
    sources, found = [pattern(5000, i) for i in range(4)], [torch.empty(5000, dtype=torch.uint8) for _ in range(4)]
    moving = []
    for slot, source, target in zip(late, sources, found, strict=True):
        moving += [tier.write(slot, source), tier.read(slot, target)]
    tier.close()
    tier.close()
    for ticket in moving:
        with suppress(StateError):  # closed before it began
            ticket.wait_on(None)
        assert ticket.ready(), "work is in flight after close"
    _require_refused("reserve", lambda: tier.reserve(1))
    _require_refused("write", lambda: tier.write(late[0], sources[0]))
    _require_refused("read", lambda: load(tier, late[0]))
    for slot in late:
        tier.free(slot)
    tier.trim()


def _reserve(tier: Tier, nbytes: int) -> Slot:
    slot = tier.reserve(nbytes)
    assert slot is not None, f"no room for {nbytes} bytes. Check a tier that has 2 MiB"
    return slot


def _require_equal(found: torch.Tensor, payload: torch.Tensor) -> None:
    wrong = (found != payload).nonzero()
    assert not len(wrong), f"{len(wrong)} of {len(payload)} bytes came back changed, the first at {int(wrong[0])}"


def _require_refused(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except StateError:
        return
    raise AssertionError(f"{what} of a closed tier does not raise StateError.")
