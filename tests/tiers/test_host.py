"""The host tier on a device whose copies run late: ordered by tickets, and never by a wait of the host."""

import mmap

import pytest
import torch

from actstore.base.ticket import DONE
from actstore.errors import StateError
from actstore.testing.tiers import pattern
from actstore.tiers.arena import IDLE_STEPS
from actstore.tiers.host import HostTier
from tests.devices.late import LateDevice, LateTicket

SEEDS = range(20)


@pytest.fixture(autouse=True)
def one_small_segment(monkeypatch):
    """So that memory is used again at once."""
    monkeypatch.setattr("actstore.tiers.arena.SEGMENT_NBYTES", 4 * mmap.PAGESIZE)


@pytest.fixture(params=SEEDS)
def device(request):
    return LateDevice(request.param)


class Program:
    """Payloads through a tier while the host waits for nothing; `check` looks at the end."""

    def __init__(self, device, tier):
        self.device, self.tier, self.expected = device, tier, []
        self.forward, self.backward = device.main, device.stream()  # of two passes that run at once
        device.run_until = None  # a wait of the host raises

    def some_steps(self):
        for _ in range(self.device.random.choice((0, 0, 1, 3))):
            self.device.step()

    def write(self, seed, nbytes):
        """The source is made late on the stream of forward, and destroyed after the write."""
        device, source = self.device, self.device.empty(nbytes)
        slot = self.tier.reserve(nbytes)
        made = device.copy(source, pattern(nbytes, seed), self.forward)
        written = self.tier.write(slot, source, (made,))
        assert slot.written is written
        device.copy(source, torch.zeros(nbytes, dtype=torch.uint8), self.forward, (written,))
        self.some_steps()
        return slot

    def read(self, slot, seed):
        """The target is in use until late on the stream of backward, and read there afterwards."""
        device = self.device
        target, result = device.empty(slot.nbytes), device.empty(slot.nbytes)
        busy = device.copy(target, torch.zeros_like(target), self.backward)
        arrived = self.tier.read(slot, target, (busy,))
        device.copy(result, target, self.backward, (arrived,))
        self.expected.append((result, pattern(slot.nbytes, seed)))
        self.some_steps()

    def check(self):
        self.device.finish()
        assert all(torch.equal(found, wanted) for found, wanted in self.expected)


def run(device):
    tier = HostTier(device)
    program = Program(device, tier)
    slots = {}
    for i in range(40):
        slots[i] = program.write(i, 1000 + 1500 * (i % 3))
        if i % 2:
            program.read(slots[i - 1], i - 1)
            program.read(slots[i - 1], i - 1)
            tier.free(slots.pop(i - 1))
        if i % 10 == 3:
            tier.free(slots.pop(i))  # never read
        if i % 10 == 9:
            tier.trim()
    for i, slot in slots.items():
        program.read(slot, i)
        tier.free(slot)
    program.check()


def test_late_copies_keep_their_order(device):
    run(device)
    assert len(device.sizes) < 20, "memory was hardly used again"


@pytest.mark.parametrize("forgotten", ["reads", "the last owner", "the write"])
def test_the_program_sees_an_order_that_is_missing(monkeypatch, forgotten):
    if forgotten == "the last owner":
        monkeypatch.setattr("actstore.tiers.arena.Segment.waits", lambda *_: ())
    elif forgotten == "reads":
        right = HostTier.free

        def free(self, slot):
            slot.place.reads = []
            right(self, slot)

        monkeypatch.setattr(HostTier, "free", free)
    else:
        read = HostTier.read

        def at_once(self, slot, dst, after=()):
            written, slot.written = slot.written, DONE
            ticket = read(self, slot, dst, after)
            slot.written = written
            return ticket

        monkeypatch.setattr(HostTier, "read", at_once)
    caught = 0
    for seed in SEEDS:
        try:
            run(LateDevice(seed))
        except AssertionError:
            caught += 1
    assert caught, "no seed shows the fault"


def test_memory_is_not_unpinned_under_a_copy():
    device = LateDevice()
    tier = HostTier(device)
    for work in ([tier.write], [tier.write, tier.read]):
        slot = tier.reserve(100)
        for operation in work:
            operation(slot, pattern(100, 1))
        tier.free(slot)
        for _ in range(2 * IDLE_STEPS):
            tier.trim()
        assert len(device.segments) == 1
        device.finish()
        tier.trim()
        assert len(device.segments) == 0


def test_both_directions_run_at_once():
    device = LateDevice()
    tier = HostTier(device)
    slots = [tier.reserve(100) for _ in range(2)]
    tier.write(slots[0], pattern(100, 0)).result()
    held = device.stream()
    never = device.copy(device.empty(1), device.empty(1), held, [LateTicket(device)])
    blocked = tier.write(slots[1], pattern(100, 1), (never,))
    found = device.empty(100)
    tier.read(slots[0], found).result()
    assert torch.equal(found, pattern(100, 0))
    assert not blocked.ready()
    for slot in slots:
        tier.free(slot)


def test_slots_are_exact_and_tell_what_they_take():
    tier = HostTier(LateDevice())
    slot = tier.reserve(1000)
    assert (slot.nbytes, slot.memory.numel(), tier.room(1000), tier.room(0)) == (1000, 1000, 1024, 64)
    assert (tier.name, tier.on_device, tier.pinned) == ("host", False, True)
    tier.free(slot)


def test_a_cap_is_a_refusal():
    tier = HostTier(LateDevice(), most_nbytes=4 * mmap.PAGESIZE)
    slot = tier.reserve(4 * mmap.PAGESIZE)
    assert tier.reserve(1) is None
    tier.free(slot)
    slot = tier.reserve(1)
    assert slot is not None
    tier.free(slot)


def test_a_refusal_of_pinned_memory_shows():
    device = LateDevice()
    device.refuses = True
    tier = HostTier(device)
    with pytest.warns(RuntimeWarning, match="Pageable memory is used from now on"):
        slot = tier.reserve(100)
    assert not tier.pinned
    tier.write(slot, pattern(100, 1)).result()
    found = device.empty(100)
    tier.read(slot, found).result()
    assert torch.equal(found, pattern(100, 1))
    tier.free(slot)


def test_close_waits_for_both_streams_and_then_returns_the_memory(device):
    tier = HostTier(device)
    slots = [tier.reserve(1000) for _ in range(3)]
    found = [device.empty(1000) for _ in slots]
    for i, slot in enumerate(slots):
        tier.write(slot, pattern(1000, i))
        tier.read(slot, found[i])
    tier.close()
    assert all(torch.equal(found[i], pattern(1000, i)) for i in range(3))
    assert device.segments == {}
    ticket = tier.read(slots[0], found[0])
    assert ticket.ready()
    with pytest.raises(StateError, match="the host tier was closed, and its bytes are gone"):
        ticket.result()
    with pytest.raises(StateError, match="host tier is closed"):
        tier.write(slots[0], found[0])
    for slot in slots:
        tier.free(slot)


def test_a_slot_is_given_back_once():
    tier = HostTier(LateDevice())
    slot = tier.reserve(100)
    tier.free(slot)
    tier.free(slot)
    assert tier._arena.used_nbytes == 0
    first, second = tier.reserve(100), tier.reserve(100)
    assert first.memory.data_ptr() != second.memory.data_ptr()
    tier.free(first)
    tier.free(second)


def test_an_interrupt_after_a_copy_was_queued_forgets_nothing(monkeypatch):
    """Ctrl-C at the worst moment: the copy runs, and the call never returned its ticket."""
    device = LateDevice()
    tier = HostTier(device)
    slot = tier.reserve(4 * mmap.PAGESIZE)
    copy = device.copy

    def interrupted(*args):
        copy(*args)
        raise KeyboardInterrupt

    for work in (tier.write, tier.read):
        with monkeypatch.context() as patch:
            patch.setattr(device, "copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                work(slot, pattern(4 * mmap.PAGESIZE, 1))
    tier.free(slot)
    again = tier.reserve(4 * mmap.PAGESIZE)
    assert len(again.place.range.after) == 2  # both streams
    tier.write(again, pattern(4 * mmap.PAGESIZE, 2)).result()
    device.finish()
    assert torch.equal(again.memory, pattern(4 * mmap.PAGESIZE, 2))
    tier.free(again)


def test_finished_reads_are_forgotten():
    device = LateDevice()
    tier = HostTier(device)
    slot = tier.reserve(100)
    tier.write(slot, pattern(100, 1))
    for _ in range(50):
        ticket = tier.read(slot, device.empty(100))
        device.finish()
    assert slot.place.reads == [ticket]
    tier.free(slot)
