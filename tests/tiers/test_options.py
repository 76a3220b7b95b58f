"""Values that say where tiers lie: what they open, with which limits and arguments."""

import pytest
import torch

from actstore import Disk, Host, PluginTier, Window
from actstore.base import extensions
from actstore.errors import ConfigError
from actstore.tiers import Cpu, DiskTier, HostMemoryTier, Limited
from actstore.tiers.options import open_tier, read_tiers

CPU = Cpu(torch.device("cpu"))


class Shelf(HostMemoryTier):
    """A tier of another package, whose number of rows is an argument."""

    name = "shelf"

    def __init__(self, device, rows=1):
        if rows < 0:
            raise KeyError(rows)
        super().__init__(device)
        self.rows = rows


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setattr(extensions, "load", lambda group, name, base: Shelf if name == "shelf" else None)
    monkeypatch.setattr(extensions, "source", lambda group, name: "of a test")
    monkeypatch.setattr(extensions, "names", lambda group: ("shelf",))


def opened(name, *options):
    tier = open_tier(name, CPU, read_tiers(options)[0])
    tier.close()
    return tier


def test_a_budget_limits_a_tier(disk_folder):
    assert isinstance(opened("host"), HostMemoryTier)
    assert opened("host", Host("1MiB")).budget_nbytes == 2**20
    limited = opened("disk", Disk(disk_folder, 4096))
    assert isinstance(limited, Limited)
    assert isinstance(limited.tier, DiskTier)
    assert limited.budget_nbytes == 4096


def test_a_tier_of_another_package_gets_its_arguments(shelf):
    assert opened("shelf").rows == 1
    assert opened("shelf", PluginTier("shelf", rows=8)).rows == 8
    limited = opened("shelf", PluginTier("shelf", "1MiB", rows=8))
    assert (limited.tier.rows, limited.budget_nbytes) == (8, 2**20)
    with pytest.raises(
        ConfigError,
        match=r"the tier 'shelf' cannot be opened: KeyError: -1. Repair or uninstall its package: of a test",
    ):
        opened("shelf", PluginTier("shelf", rows=-1))
    with pytest.raises(ConfigError, match=r"PluginTier\(name='rack'\): no installed package.*host, disk, shelf"):
        opened("rack", PluginTier("rack"))


def test_values_are_values():
    assert Host("1GiB") == Host("1GiB") != Host("2GiB")
    assert PluginTier("shelf", rows=8) == PluginTier("shelf", rows=8) != PluginTier("shelf", rows=9)
    assert repr(PluginTier("shelf", rows=8)) == "PluginTier(name='shelf', budget=None, arguments={'rows': 8})"
    assert read_tiers([]) == ({}, Window())
    assert read_tiers([Window("1MiB")])[1].limit_nbytes == 2**20
