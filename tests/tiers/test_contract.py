"""Every tier keeps the promises of every tier."""

import mmap

import pytest
import torch
import torch.distributed as dist

from actstore.devices import Cpu
from actstore.errors import StateError, TransferError
from actstore.testing.tiers import check_tier, load, pattern, store
from actstore.tiers import DeviceTier, HostMemoryTier
from actstore.tiers.base import Limited
from actstore.tiers.disk import DiskTier
from actstore.tiers.group import GroupTier
from actstore.tiers.host import HostTier
from tests.devices.late import LateDevice
from tests.tiers.wrappers import Faulty, Slow, Wrapper

CPU = Cpu(torch.device("cpu"))


@pytest.mark.parametrize("tier", [DeviceTier, HostMemoryTier])
def test_memory(tier):
    check_tier(tier(CPU))


def test_disk(disk_folder):
    check_tier(DiskTier(disk_folder, CPU))


def test_a_budget(disk_folder):
    check_tier(Limited(DeviceTier(CPU), 2**21))
    check_tier(Limited(DiskTier(disk_folder, CPU), 2**21))
    check_tier(Limited(HostTier(LateDevice()), 2**21))


def test_a_group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check_tier(GroupTier(dist.group.WORLD, 10.0, on_host=True))
        check_tier(Limited(GroupTier(dist.group.WORLD, 10.0, on_host=True), 2**21))
    finally:
        dist.destroy_process_group()


def test_slow_work(disk_folder):
    check_tier(Slow(DeviceTier(CPU), 0.001))
    check_tier(Slow(DiskTier(disk_folder, CPU), 0.001))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tier", [HostTier, DeviceTier])
def test_beside_a_device(monkeypatch, tier, seed):
    monkeypatch.setattr("actstore.tiers.arena.SEGMENT_NBYTES", 4 * mmap.PAGESIZE)
    check_tier(tier(LateDevice(seed)))


def test_disk_beside_a_device(disk_folder):
    check_tier(DiskTier(disk_folder, LateDevice()))


def test_device_memory_that_another_stream_reads_is_kept_until_then():
    device = LateDevice()
    tier = DeviceTier(device)
    other = device.stream()
    for by_hand in (False, True):
        slot = tier.reserve(1000)
        tier.write(slot, pattern(1000, 1)).result()
        memory, found = slot.memory, device.empty(1000)
        with device.on(other):
            if by_hand:
                device.copy(found, memory, other)
                tier.used(slot)
            else:
                tier.read(slot, found)
        tier.free(slot)
        tier.trim()
        assert [kept is memory for kept, _ in tier._lent] == [True]
        device.finish()
        tier.trim()
        assert tier._lent == []
        assert torch.equal(found, pattern(1000, 1))
    tier.close()


def test_device_memory_that_its_own_stream_uses_is_let_go_at_once():
    device = LateDevice()
    tier = DeviceTier(device)
    slot = tier.reserve(1000)
    tier.write(slot, pattern(1000, 1))
    tier.read(slot, device.empty(1000))
    tier.used(slot)
    tier.free(slot)
    tier.trim()
    assert tier._lent == []


# -- the wrappers of other tests --------------------------------------------------------------------------------------


def test_a_slow_tier_does_not_do_what_was_dropped():
    tier = Slow(DeviceTier(CPU), 0.02)
    slots = [tier.reserve(100) for _ in range(4)]
    tickets = [tier.write(slot, pattern(100, 1)) for slot in slots]
    tickets.append(tier.read(slots[3], pattern(100, 2)))
    for slot in slots[1:]:
        tier.free(slot)
    for ticket in tickets:
        ticket.result()
    assert torch.equal(load(tier, slots[0]), pattern(100, 1))
    assert (tier.writes, tier.reads) == (1, 1)
    tier.free(slots[0])
    tier.close()


@pytest.mark.parametrize("fault", ["reserve", "write", "read"])
def test_a_faulty_tier_fails_at_the_call(fault):
    tier = Faulty(DeviceTier(CPU))
    slot, payload = tier.reserve(100), pattern(100, 1)
    calls = {
        "reserve": lambda: tier.reserve(100),
        "write": lambda: tier.write(slot, payload),
        "read": lambda: tier.read(slot, payload),
    }
    tier.faults.add(fault)
    with pytest.raises(TransferError, match=f"a planted fault of {fault}$") as caught:
        calls[fault]()
    assert caught.value.what == fault
    tier.free(slot)
    tier.close()


@pytest.mark.parametrize("fault", ["late write", "late read"])
def test_a_faulty_tier_fails_in_the_ticket(fault):
    tier = Faulty(DeviceTier(CPU), fault)
    slot, payload = tier.reserve(100), pattern(100, 1)
    tickets = [tier.write(slot, payload), tier.read(slot, payload)]
    assert all(ticket.ready() for ticket in tickets)
    for ticket in tickets if fault == "late write" else tickets[1:]:
        with pytest.raises(TransferError, match=f"a planted fault of {fault}$") as caught:
            ticket.result()
        assert caught.value.what == fault
    tier.free(slot)
    tier.close()


def test_the_contract_sees_a_tier_that_is_wrong():
    """Each of these breaks one promise, and only that."""

    class Wrong(Wrapper):
        def __init__(self, tier):
            super().__init__(tier)
            self.slots = []

        def reserve(self, nbytes):
            self.slots.append(self.tier.reserve(nbytes))
            return self.slots[-1]

    class Alters(Wrong):
        def write(self, slot, src, after=()):
            ticket = self.tier.write(slot, src, after)
            if src.numel() == 4097:
                slot.memory[4096] ^= 1
            return ticket

    class Spills(Wrong):
        last = None

        def write(self, slot, src, after=()):
            if self.last is not None and self.last.buffer is not None and self.last.nbytes:
                self.last.memory[0] ^= 1
            self.last = slot
            return self.tier.write(slot, src, after)

    class Cuts(Wrong):
        def read(self, slot, dst, after=()):
            return self.tier.read(slot, dst[: len(dst) // 4096 * 4096] if len(dst) < slot.nbytes else dst, after)

    class StaysOpen(Wrong):
        def close(self):
            pass

    for kind in (Alters, Spills, Cuts, StaysOpen):
        wrong = kind(DeviceTier(CPU))
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check_tier(wrong)
        for slot in wrong.slots:
            wrong.free(slot)  # again, for most: without effect


def test_a_closed_device_tier():
    for device in (CPU, LateDevice()):
        tier = DeviceTier(device)
        slot = store(tier, pattern(100, 1))
        tier.close()
        ticket = tier.read(slot, device.empty(100))
        with pytest.raises(StateError, match="the device tier was closed, and its bytes are gone"):
            ticket.result()
        tier.free(slot)
