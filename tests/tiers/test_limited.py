"""A budget is kept, whoever asks, and given back whatever fails."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from actstore.devices import Cpu
from actstore.errors import TransferError
from actstore.tiers import DeviceTier
from actstore.tiers.base import Limited
from tests.tiers.wrappers import Faulty, Wrapper

CPU = Cpu(torch.device("cpu"))


def test_refusal_is_none_and_freeing_makes_room():
    tier = Limited(DeviceTier(CPU), 1000)
    assert (tier.name, tier.on_device) == ("device", True)
    first, second = tier.reserve(600), tier.reserve(400)
    assert tier.reserve(1) is None
    tier.free(first)
    assert tier.reserve(601) is None
    third = tier.reserve(600)
    for slot in (second, third):
        tier.free(slot)
    assert tier.reserve(1001) is None


def test_the_budget_holds_under_threads():
    class Counting(DeviceTier):
        def __init__(self):
            super().__init__(CPU)
            self.lock = threading.Lock()
            self.used = self.most = 0

        def reserve(self, nbytes):
            slot = super().reserve(nbytes)
            with self.lock:
                self.used += nbytes
                self.most = max(self.most, self.used)
            return slot

        def free(self, slot):
            with self.lock:
                self.used -= slot.nbytes
            super().free(slot)

    inner = Counting()
    tier = Limited(inner, 1000)

    def work(seed):
        refused = 0
        for i in range(300):
            slots = [tier.reserve(50 * (1 + (seed + i + j) % 5)) for j in range(3)]
            refused += slots.count(None)
            for slot in slots:
                if slot is not None:
                    tier.free(slot)
        return refused

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert 0 < inner.most <= 1000
    slot = tier.reserve(1000)
    assert slot is not None
    tier.free(slot)


def test_an_inner_failure_gives_the_bytes_back():
    inner = Faulty(DeviceTier(CPU), "reserve")
    tier = Limited(inner, 1000)
    for _ in range(3):
        with pytest.raises(TransferError, match="planted"):
            tier.reserve(1000)
    inner.faults.clear()
    slot = tier.reserve(1000)
    tier.free(slot)


def test_an_inner_refusal_gives_the_bytes_back():
    tier = Limited(Limited(DeviceTier(CPU), 10), 1000)
    for _ in range(3):
        assert tier.reserve(1000) is None
    slot = tier.reserve(10)
    tier.free(slot)


def test_a_budget_counts_what_the_tier_takes():
    class Pages(Wrapper):
        def room(self, nbytes):
            return -(-nbytes // 4096) * 4096

    inner = Pages(DeviceTier(CPU))
    tier = Limited(inner, 3 * 4096)
    assert (tier.room(1), tier.room(4097)) == (4096, 8192)
    first, second = tier.reserve(1), tier.reserve(4097)
    assert (first.nbytes, second.nbytes) == (1, 4097)
    assert tier.reserve(1) is None
    tier.free(second)
    assert tier.reserve(8193) is None
    third = tier.reserve(8192)
    assert tier.reserve(1) is None
    for slot in (first, third):
        tier.free(slot)
    inner_most = tier.reserve(3 * 4096)
    assert inner_most is not None
    tier.free(inner_most)
