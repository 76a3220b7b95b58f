"""Values that say where tiers lie: what they open, with which limits and arguments."""

from collections import Counter
from socket import gethostname
from time import sleep

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from actstore import Disk, Group, Host, PluginTier, Window
from actstore.base import extensions
from actstore.errors import ConfigError, TransferError
from actstore.tiers import Cpu, HostMemoryTier, group
from actstore.tiers.base import Limited
from actstore.tiers.disk import DiskTier
from actstore.tiers.group import GroupTier
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


def test_a_group_is_checked():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        here = Group(dist.group.WORLD)
        with pytest.raises(ConfigError, match="must be 'wait' beside Group"):
            read_tiers([here, Window(when_full="keep")])
        with pytest.raises(ConfigError, match=r"Group\(wait_s=0\): must be seconds above 0"):
            Group(dist.group.WORLD, wait_s=0)
        with pytest.raises(ConfigError, match=r"Group\(budget\)"):
            Group(dist.group.WORLD, "much")
        with pytest.raises(ConfigError, match="must be a process group that this rank is in"):
            Group(None)
        mesh = init_device_mesh("cpu", (1,))
        assert isinstance(opened("group", Group(mesh)), GroupTier)
        limited = opened("group", Group(mesh, 4096))
        assert limited.budget_nbytes == 4096
    finally:
        dist.destroy_process_group()
    with pytest.raises(ConfigError, match="the tier 'group' needs its process group"):
        opened("group")


def test_a_group_whose_other_rank_makes_no_store_is_an_error(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
        monkeypatch.setattr(group, "_LOOKUP_S", 0.2)
        with pytest.raises(ConfigError, match=r"rank 1 has made no store in 0\.25 s"):
            opened("group", Group(dist.group.WORLD, wait_s=0.05))
    finally:
        dist.destroy_process_group()


def test_a_slow_look_up_of_names_is_not_a_rank_that_does_not_answer(monkeypatch):
    """PyTorch looks up the name of an address while it connects, which takes 5 s where a name server is silent."""

    def slowly(address, wait_s):
        sleep(0.3)
        return connect(address, wait_s)

    rendezvous, connect = dist.HashStore(), group._connect
    dist.init_process_group("gloo", store=rendezvous, rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
        monkeypatch.setattr(group, "_MARGIN_S", 0.05)
        monkeypatch.setattr(group, "_made", Counter())
        monkeypatch.setattr(group, "_connect", slowly)
        other = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        dist.PrefixStore("actstore/group/0-1/0", _get_default_store()).set("address/1", f"{gethostname()} {other.port}")
        both = group.Peers(dist.group.WORLD, 0.1)
        other.set("slice", "bytes")
        assert both.get(1, "slice") == b"bytes"
        with pytest.raises(TransferError, match=r"rank 1 has (not answered|served no slice) in 0\.1 s"):
            both.get(1, "another slice")
        both.close()
    finally:
        dist.destroy_process_group()
