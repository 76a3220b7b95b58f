"""The order of streams, proven on a simulated accelerator: every wait that is left out shows as wrong bytes."""

import os
import threading

import pytest
import torch

from actstore.ticket import EventTicket
from actstore.tiers import DiskTier, HostTier
from actstore.transfer import Transfer, engine
from tests.contracts import streams
from tests.contracts.streams import DEVICE, on_device, simulate

NBYTES = 64
SEEDS = range(40)


class DeviceMemory:
    """What torch's allocator does: memory that was freed is given out again at once, in the order of one stream."""

    def __init__(self):
        self.free = {}
        self.made = 0

    def take(self, stream):
        idle = self.free.setdefault(stream, [])
        self.made += not idle
        return idle.pop() if idle else on_device(torch.zeros(NBYTES, dtype=torch.uint8))

    def give(self, stream, buffer):
        self.free[stream].append(buffer)


def train(accelerator, tier, *, steps=2, count=6):
    """Offload on the compute stream, fetch on two streams, let everything be used again as early as allowed."""
    memory, transfer = DeviceMemory(), Transfer(DEVICE)
    side = streams.Stream(accelerator)
    wrong = []

    def fetch(slot, value, stream):
        with stream:
            out = memory.take(stream)
            tier.read(slot, out)
            plain = out.as_subclass(torch.Tensor)
            accelerator.enqueue(lambda: wrong.extend(set(plain.tolist()) - {value}))
            memory.give(stream, out)

    for step in range(steps):
        slots = {}
        for i in range(count):
            value = 1 + step * count + i
            stream = accelerator.current
            buffer = memory.take(stream)
            plain = buffer.as_subclass(torch.Tensor)
            accelerator.enqueue(lambda plain=plain, value=value: plain.fill_(value))  # encode
            slots[value] = slot = tier.reserve(NBYTES)
            transfer.offload(tier, slot, buffer, lambda buffer, stream=stream: memory.give(stream, buffer))
            del buffer
            accelerator.some_steps()
        side.wait_stream(accelerator.current)  # as a user must who runs backward on another stream
        for value, slot in reversed(slots.items()):
            for stream in accelerator.random.sample([accelerator.main, side], 2):
                fetch(slot, value, stream)
                accelerator.some_steps()
            tier.free(slot)
            if accelerator.random.random() < 0.3:
                tier.trim()
        # The next forward does not wait for this backward: only our own buffers are shared by the two.
    transfer.drain()
    accelerator.finish()
    accelerator.host_may_wait = True
    tier.close()
    return wrong, memory


@pytest.fixture
def small_window(monkeypatch):
    monkeypatch.setattr(engine, "DEVICE_WINDOW_NBYTES", 2 * NBYTES)


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_are_right_and_the_host_never_waits(monkeypatch, seed):
    accelerator = simulate(monkeypatch, seed)
    wrong, memory = train(accelerator, HostTier(DEVICE))
    assert wrong == []
    assert memory.made <= 2 + 1 + 2  # a window of copies, one being encoded, one being fetched on each stream


def leave_out(monkeypatch, name):
    """Plant one of the bugs that such code has had."""
    if name == "the copy waits for the compute stream":
        monkeypatch.setattr(streams.Stream, "wait_stream", lambda self, other: None)
    elif name == "a buffer waits for its last owner":
        monkeypatch.setattr(HostTier, "_mark", mark_nothing)
    elif name == "a buffer waits for all who read it":
        monkeypatch.setattr(HostTier, "_mark", mark_the_last)
    elif name == "a read waits for its write":
        monkeypatch.setattr(EventTicket, "wait_on", lambda self, stream: None)
    elif name == "device memory waits for the copy":
        monkeypatch.setattr(EventTicket, "ready", lambda self: True)


def mark_nothing(self, buffer, stream):
    event = torch.Event(stream.device)
    event.record(stream)
    return event


def mark_the_last(self, buffer, stream):
    event = mark_nothing(self, buffer, stream)
    self._busy[buffer.data_ptr()] = [event]
    return event


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize(
    "rule",
    [
        "the copy waits for the compute stream",
        "a buffer waits for its last owner",
        "a buffer waits for all who read it",
        "a read waits for its write",
        "device memory waits for the copy",
    ],
)
def test_a_rule_left_out_is_caught(monkeypatch, rule):
    caught = 0
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            accelerator = simulate(patch, seed)
            leave_out(patch, rule)
            caught += bool(train(accelerator, HostTier(DEVICE))[0])
    assert caught


@pytest.mark.parametrize("seed", range(5))
def test_pageable_memory_is_right_too(monkeypatch, seed):
    accelerator = simulate(monkeypatch, seed)
    accelerator.host_may_wait = True  # the price of the fallback
    tier = HostTier(DEVICE)
    tier._pool.pinned = False
    assert train(accelerator, tier)[0] == []


def test_threads_may_offload_at_once(monkeypatch):
    """A torch.Stream can be entered by one thread at a time."""
    accelerator = simulate(monkeypatch)
    tier, transfer = HostTier(DEVICE), Transfer(DEVICE)
    errors = []

    def work():
        try:
            for _ in range(50):
                slot = tier.reserve(NBYTES)
                transfer.offload(tier, slot, on_device(torch.zeros(NBYTES, dtype=torch.uint8)), lambda buffer: None)
                tier.free(slot)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    transfer.drain()
    accelerator.finish()
    accelerator.host_may_wait = True
    tier.close()


@pytest.mark.usefixtures("small_window")
def test_events_do_not_pile_up(monkeypatch):
    accelerator = simulate(monkeypatch)
    tier = HostTier(DEVICE)
    slot, buffer = tier.reserve(NBYTES), on_device(torch.zeros(NBYTES, dtype=torch.uint8))
    tier.write(slot, buffer)
    for _ in range(50):  # a retained graph reads again and again
        tier.read(slot, buffer)
        accelerator.finish()
    assert [len(events) for events in tier._busy.values()] == [1]
    tier.trim()
    assert tier._busy == {}
    tier.free(slot)


# -- the disk behind an accelerator -----------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch, disk_folder):
    accelerator = simulate(monkeypatch)
    host = HostTier(DEVICE)
    tier = DiskTier(disk_folder, host)
    yield accelerator, host, tier
    accelerator.finish()
    accelerator.host_may_wait = True
    tier.close()
    assert host._pool.used_nbytes == 0


def put(accelerator, tier, value):
    slot, buffer = tier.reserve(NBYTES), on_device(torch.full((NBYTES,), value, dtype=torch.uint8))
    return slot, tier.write(slot, buffer)


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize("seed", range(10))
def test_through_staging_to_disk_and_back(monkeypatch, disk_folder, seed):
    accelerator = simulate(monkeypatch, seed)
    host = HostTier(DEVICE)
    tier = DiskTier(disk_folder, host)
    read = DiskTier.read

    def reading(self, slot, dst):
        slot.written.result()
        accelerator.host_may_wait = True  # for the copy that the staging memory was last used for
        ticket = read(self, slot, dst)
        accelerator.host_may_wait = False
        return ticket

    monkeypatch.setattr(DiskTier, "read", reading)
    assert train(accelerator, tier)[0] == []
    assert host._pool.used_nbytes == 0


def test_device_memory_is_free_before_the_disk_has_it(disk, monkeypatch):
    accelerator, _, tier = disk
    may_write = threading.Event()
    pwrite = hold_writes(monkeypatch, may_write)
    slot, ticket = put(accelerator, tier, 5)
    accelerator.finish()
    assert ticket.ready()
    assert pwrite == []
    may_write.set()
    slot.written.result()
    assert pwrite == [NBYTES]
    tier.free(slot)


def hold_writes(monkeypatch, may_write):
    real, written = os.pwrite, []

    def pwrite(fd, view, at):
        assert may_write.wait(20)
        written.append(len(view))
        return real(fd, view, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return written


def test_staging_memory_is_bounded(disk, monkeypatch):
    accelerator, host, tier = disk
    monkeypatch.setattr("actstore.tiers.staging.STAGED_NBYTES", 3 * NBYTES)
    may_write = threading.Event()
    hold_writes(monkeypatch, may_write)
    most, slots = [], []

    def work():
        for i in range(10):
            slots.append(put(accelerator, tier, i)[0])
            most.append(host._pool.used_nbytes)

    thread = threading.Thread(target=work)
    thread.start()
    while len(slots) < 3:
        thread.join(0.01)
    thread.join(0.1)
    assert thread.is_alive()  # waits for the disk
    assert len(slots) == 3
    may_write.set()
    thread.join(20)
    assert not thread.is_alive()
    assert max(most) <= 3 * NBYTES
    monkeypatch.setattr("actstore.tiers.staging.STAGED_NBYTES", 1)
    slots.append(put(accelerator, tier, 10)[0])  # larger than all there is: goes alone
    for slot in slots:
        slot.written.result()
        tier.free(slot)


def test_staging_memory_of_a_fetch_is_not_overwritten(disk):
    """The second read may get the memory that the first one's copy still reads."""
    accelerator, _, tier = disk
    slots = [put(accelerator, tier, value)[0] for value in (1, 2)]
    for slot in slots:
        slot.written.result()
    accelerator.finish()
    outs = [on_device(torch.zeros(NBYTES, dtype=torch.uint8)) for _ in slots]
    tier.read(slots[0], outs[0])
    assert accelerator.waits == 0
    accelerator.host_may_wait = True
    tier.read(slots[1], outs[1])
    assert accelerator.waits == 1
    accelerator.finish()
    assert [set(out.as_subclass(torch.Tensor).tolist()) for out in outs] == [{1}, {2}]
    for slot in slots:
        tier.free(slot)


def test_a_payload_dropped_at_once_frees_its_staging(disk):
    accelerator, _, tier = disk
    for value in range(5):
        slot, _ = put(accelerator, tier, value)
        tier.free(slot)
    kept, _ = put(accelerator, tier, 9)
    kept.written.result()
    out = on_device(torch.zeros(NBYTES, dtype=torch.uint8))
    accelerator.finish()
    tier.read(kept, out)
    accelerator.finish()
    assert set(out.as_subclass(torch.Tensor).tolist()) == {9}
    tier.free(kept)


def test_a_write_that_cannot_start_leaves_no_staging(disk):
    _, host, tier = disk
    slot = tier.reserve(NBYTES)
    tier._worker.shutdown()
    with pytest.raises(RuntimeError, match="takes no more writes"):
        tier.write(slot, on_device(torch.zeros(NBYTES, dtype=torch.uint8)))
    assert host._pool.used_nbytes == 0
    assert tier._staging._nbytes == 0
    tier.free(slot)
