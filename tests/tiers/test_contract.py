"""Every tier keeps the promises of every tier."""

import pytest
import torch

from actstore.tiers import DeviceTier, DiskTier, HostMemoryTier, HostTier, Limited
from tests.contracts.streams import simulate
from tests.contracts.tiers import check_tier
from tests.tiers.wrappers import Slow, Wrapper

CPU = torch.device("cpu")


@pytest.mark.parametrize("tier", [DeviceTier, HostMemoryTier])
def test_memory(tier):
    check_tier(tier(CPU))


def test_disk(disk_folder):
    check_tier(DiskTier(disk_folder, None))


def test_a_budget(disk_folder):
    check_tier(Limited(DeviceTier(CPU), 2**20))
    check_tier(Limited(DiskTier(disk_folder, None), 2**20))


def test_a_delayed_writer(disk_folder):
    check_tier(Slow(DiskTier(disk_folder, None), 0.001))


@pytest.mark.parametrize("seed", range(3))
def test_pinned_memory(monkeypatch, seed):
    accelerator = simulate(monkeypatch, seed)
    accelerator.host_may_wait = True

    class Synchronous(Wrapper):
        def read(self, slot, dst):
            ticket = super().read(slot, dst)
            accelerator.finish()
            return ticket

    check_tier(Synchronous(HostTier(accelerator.main.device)))
