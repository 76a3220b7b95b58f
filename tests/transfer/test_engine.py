"""The window: its bytes are bounded, whatever the threads, and every buffer comes back."""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from actstore.errors import TransferError
from actstore.ticket import FutureTicket
from actstore.tiers import DeviceTier, DiskTier
from actstore.transfer import Transfer, engine
from tests.contracts.tiers import load, pattern
from tests.tiers.wrappers import Faulty, Slow, Wrapper

CPU = torch.device("cpu")


class Manual(Wrapper):
    """Writes end when the test says so."""

    def __init__(self):
        super().__init__(DeviceTier(CPU))
        self.futures = []

    def write(self, slot, src):
        self.futures.append(Future())
        return FutureTicket(self.futures[-1])


@pytest.fixture
def transfer(monkeypatch):
    monkeypatch.setattr(engine, "HOST_WINDOW_NBYTES", 300)
    transfer = Transfer(CPU)
    yield transfer
    transfer.drain()


def start(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.05)
    return thread


def test_the_host_waits_when_the_window_is_full(transfer):
    tier, landed = Manual(), []
    slot = tier.reserve(100)
    for _ in range(3):
        transfer.offload(tier, slot, pattern(100, 0), landed.append)
    assert landed == []
    fourth = start(lambda: transfer.offload(tier, slot, pattern(100, 0), landed.append))
    assert fourth.is_alive()
    tier.futures[0].set_result(None)
    fourth.join(10)
    assert len(landed) == 1
    for future in tier.futures[1:]:
        future.set_result(None)
    transfer.poll()
    assert len(landed) == 4
    tier.free(slot)


def test_a_larger_buffer_flies_alone(transfer):
    tier, landed = Manual(), []
    slot = tier.reserve(1000)
    transfer.offload(tier, slot, pattern(100, 0), landed.append)
    large = start(lambda: transfer.offload(tier, slot, pattern(1000, 0), landed.append))
    assert large.is_alive()
    tier.futures[0].set_result(None)
    large.join(10)
    after = start(lambda: transfer.offload(tier, slot, pattern(1, 0), landed.append))
    assert after.is_alive()
    tier.futures[1].set_result(None)
    after.join(10)
    tier.futures[2].set_result(None)
    transfer.drain()
    assert [buffer.numel() for buffer in landed] == [100, 1000, 1]
    tier.free(slot)


def test_poll_does_not_wait_and_keeps_the_order(transfer):
    tier, landed = Manual(), []
    slot = tier.reserve(10)
    for n in (1, 2, 3):
        transfer.offload(tier, slot, pattern(n, 0), lambda buffer: landed.append(buffer.numel()))
    tier.futures[1].set_result(None)
    transfer.poll()
    assert landed == []
    tier.futures[0].set_result(None)
    transfer.poll()
    assert landed == [1, 2]
    tier.futures[2].set_result(None)
    tier.free(slot)


def test_a_failed_write_lands_like_any_other(transfer):
    tier, landed = Manual(), []
    slot = tier.reserve(10)
    transfer.offload(tier, slot, pattern(10, 0), landed.append)
    tier.futures[0].set_exception(TransferError("planted"))
    transfer.drain()
    assert len(landed) == 1
    tier.free(slot)


def test_a_write_that_does_not_start_books_nothing(transfer):
    tier = Faulty(DeviceTier(CPU), "write")
    slot = tier.reserve(10)
    with pytest.raises(TransferError, match="planted fault of write"):
        transfer.offload(tier, slot, pattern(10, 0), None)
    tier.free(slot)


def test_an_interrupted_wait_loses_no_flight(transfer, monkeypatch):
    tier, landed = Manual(), []
    slot = tier.reserve(300)
    transfer.offload(tier, slot, pattern(300, 0), landed.append)

    def interrupt(self, stream):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FutureTicket, "wait_on", interrupt)
        with pytest.raises(KeyboardInterrupt):
            transfer.offload(tier, slot, pattern(300, 0), landed.append)
    assert landed == []  # its memory is still being read
    tier.futures[0].set_result(None)
    transfer.drain()
    assert len(landed) == 1
    tier.free(slot)


def test_the_window_holds_for_several_threads(transfer):
    lock, flying, most = threading.Lock(), 0, 0

    class Counting(Slow):
        def write(self, slot, src):
            nonlocal flying, most
            with lock:
                flying += src.numel()
                most = max(most, flying)
            return super().write(slot, src)

    tier = Counting(DeviceTier(CPU), 0.0005)

    def landed(buffer):
        nonlocal flying
        with lock:
            flying -= buffer.numel()

    def work(seed):
        for i in range(30):
            n = 20 + 10 * ((seed + i) % 5)
            slot = tier.reserve(n)
            payload = pattern(n, 100 * seed + i)
            transfer.offload(tier, slot, payload.clone(), landed)
            assert torch.equal(load(tier, slot), payload)
            tier.free(slot)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    transfer.drain()
    assert flying == 0
    assert 60 <= most <= 300
    tier.close()


@pytest.mark.parametrize("when", ["at once", "later"])
def test_the_buffer_may_change_once_it_has_landed(disk_folder, transfer, when):
    tier = Slow(DiskTier(disk_folder, None), 0.002)
    payloads = [pattern(120, i) for i in range(8)]
    slots = []
    for payload in payloads:
        slots.append(tier.reserve(120))
        transfer.offload(tier, slots[-1], payload.clone(), lambda buffer: buffer.fill_(0xEE))
        if when == "at once":
            assert torch.equal(load(tier, slots[-1]), payload)
    for slot, payload in zip(slots, payloads, strict=True):
        assert torch.equal(load(tier, slot), payload)
        tier.free(slot)
    transfer.drain()
    tier.close()


def test_dropped_right_after_put(disk_folder, transfer):
    tier = DiskTier(disk_folder, None)
    for i in range(50):
        slot = tier.reserve(100)
        transfer.offload(tier, slot, pattern(100, i), lambda buffer: buffer.fill_(0xEE))
        tier.free(slot)
    transfer.drain()
    kept = tier.reserve(100)
    transfer.offload(tier, kept, pattern(100, 99), lambda buffer: buffer.fill_(0xEE))
    assert torch.equal(load(tier, kept), pattern(100, 99))
    tier.free(kept)
    tier.trim()
    assert os.fstat(tier._file._fd).st_size <= 51 * 4096
    transfer.drain()
    tier.close()
