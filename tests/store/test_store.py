"""Put and get: the bytes back from any tier, the ladder, the books, and every way to fail."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from actstore import Disk, Host
from actstore.base.spec import Site
from actstore.codecs import Int8, Raw, Zmask
from actstore.devices import Cpu
from actstore.errors import CapacityError, PayloadError, StateError, TransferError
from actstore.store.payload import Payload
from actstore.store.store import Store
from actstore.store.tierset import StoreOptions
from actstore.tiers import DeviceTier, Slot
from actstore.transfer import Berth
from actstore.transfer.parcel import ParcelState
from tests.autograd.checks import settle
from tests.contracts.clean import all_freed
from tests.tiers.conftest import disk_folder
from tests.tiers.wrappers import Faulty, Slow

__all__ = ["all_freed", "disk_folder"]

CPU = torch.device("cpu")
TIERS = ["device", "host", "disk"]


class Owned(Payload):
    __slots__ = ()

    def __init__(self, store, site=0):
        super().__init__(store.ledger.account(Site("m", site)))


@pytest.fixture
def make(disk_folder):
    made = []

    def make(**options):
        made.append(Store(StoreOptions(**{"tiers": {"disk": Disk(disk_folder)}} | options)))
        return made[-1]

    yield make
    for store in made:
        store.close()
        assert [(a.held, a.away) for a in store.ledger.accounts() if a.held or a.away] == []


def put(store, tensor, *tiers, codec=None, site=0, saved=0):
    """A forward pass of one tensor."""
    entry, forward = Owned(store, site), store.begin(CPU)
    route = store.route(entry.account, tensor, codec or Raw(), tiers)
    found = store.put(entry, tensor, route, saved, forward)
    store.end(forward)
    return entry if found else None


def tier_of(entry):
    if entry is None or isinstance(entry.room, torch.Tensor):
        return entry and "device"
    return (entry.room if isinstance(entry.room, Slot) else entry.room.parcel).tier.name


def land(store, *entries):
    """Wait until payloads have left the device."""
    for entry in entries:
        if isinstance(entry.room, Berth):
            entry.room.parcel.motion.wait_on(None)
    store.poll()


def drain(store):
    for place in store._places.values():
        settle(place.engine)


def get(store, entry, like):
    out = torch.full_like(like, -7)
    store.get(entry, out)
    return out


def wrap(store, name, wrapper):
    """Put a wrapper around an open tier."""
    store.place(CPU).tier(name)
    tiers = store._places[CPU]._open
    tiers[name] = wrapper(tiers[name])
    return tiers[name]


def totals(store):
    store.poll()
    accounts = store.ledger.accounts()
    return tuple(sum(getattr(a, name) for a in accounts) for name in ("saved", "stored", "held", "away"))


@pytest.mark.parametrize("tier", TIERS)
def test_raw_comes_back_bit_for_bit(make, tier):
    store = make()
    tensors = [
        torch.randn(33, 17),
        torch.tensor([float("nan"), float("inf"), -0.0, 1e-42]),
        torch.arange(1000, dtype=torch.int16),
        torch.empty(0),
        torch.randn(4, 5).t(),
    ]
    entries = [put(store, tensor, tier, site=i) for i, tensor in enumerate(tensors)]
    for _ in range(2):
        for tensor, entry in zip(tensors, entries, strict=True):
            back = get(store, entry, tensor)
            assert back.stride() == tensor.stride()
            assert torch.equal(back.view(torch.uint8) if back.dim() == 1 else back, tensor.view(torch.uint8)
                               if tensor.dim() == 1 else tensor)  # fmt: skip


@pytest.mark.parametrize("tier", TIERS)
def test_the_source_may_change_at_once(make, tier):
    store = make()
    tensor = torch.arange(100_000.0)
    entry = put(store, tensor, tier)
    tensor.zero_()
    assert torch.equal(get(store, entry, tensor), torch.arange(100_000.0))


@pytest.mark.parametrize("tier", TIERS)
def test_the_books(make, tier):
    store = make()
    tensor = torch.randn(4096)
    entry = put(store, tensor, tier, codec=Int8(), saved=tensor.nbytes)
    stored = entry.room.nbytes
    land(store, entry)
    assert totals(store) == (tensor.nbytes, stored, *((0, stored) if tier == "disk" else (stored, 0)))
    assert store.ledger.peak == stored
    get(store, entry, tensor)
    assert store.ledger.peak == tensor.nbytes + stored
    del entry
    assert totals(store)[2:] == (0, 0)


def test_threads(make):
    store = make()
    wrap(store, "disk", lambda tier: Slow(tier, 0.0005))

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for i in range(20):
            tensor = torch.randn(500 + 10 * (i % 3), generator=generator)
            entries = [put(store, tensor, tier, site=seed) for tier in TIERS]
            for entry in entries:
                assert torch.equal(get(store, entry, tensor), tensor)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    drain(store)
    assert totals(store)[2:] == (0, 0)


def test_several_threads_read_one_entry(make):
    store = make()
    tensor = torch.randn(10_000)
    entry = put(store, tensor, "disk")
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda _: torch.equal(get(store, entry, tensor), tensor), range(40)))


# -- room -------------------------------------------------------------------------------------------------------------


def test_the_ladder_goes_down(make, disk_folder):
    store = make(tiers={"host": Host(4000), "disk": Disk(disk_folder, 8192)})
    tensor = torch.randn(1000)
    entries = [put(store, tensor, "host", "disk") for _ in range(4)]
    assert [tier_of(entry) for entry in entries] == ["host", "disk", "disk", None]
    assert all(torch.equal(get(store, entry, tensor), tensor) for entry in entries[:3])
    land(store, *entries[:3])
    assert totals(store)[2:] == (4000, 8000)
    entries[0] = None
    assert tier_of(put(store, tensor, "host", "disk")) == "host"


def test_strict(make, disk_folder):
    store = make(tiers={"host": Host(10), "disk": Disk(disk_folder, 10)}, strict=True)
    with pytest.raises(CapacityError, match=r"no room for 3.9 KiB in host > disk. Raise the budget") as caught:
        put(store, torch.randn(1000), "host", "disk")
    assert (caught.value.nbytes, caught.value.tiers) == (4000, ("host", "disk"))
    assert isinstance(caught.value, MemoryError)
    assert totals(store) == (0, 0, 0, 0)
    assert put(store, torch.zeros(2), "host", "disk") is not None


def test_a_full_disk(make, monkeypatch):
    store = make()
    store.open(CPU, ["disk"])

    def full(*_):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert put(store, torch.randn(1000), "disk") is None
    assert put(store, torch.randn(1000), "disk") is not None


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_tier_that_fails_to_reserve_books_nothing(make):
    store = make()
    tier = wrap(store, "disk", lambda tier: Faulty(tier, "reserve"))
    for _ in range(3):
        with pytest.raises(TransferError, match="planted fault of reserve"):
            put(store, torch.randn(1000), "disk", saved=4000)
    assert totals(store) == (0, 0, 0, 0)
    tier.faults.clear()
    assert put(store, torch.randn(1000), "disk") is not None


@pytest.mark.parametrize("fault", ["write", "late write"])
def test_what_cannot_be_written_stays_on_the_device(make, fault):
    store = make()
    wrap(store, "disk", lambda tier: Faulty(tier, fault))
    tensor = torch.randn(1000)
    with pytest.warns(RuntimeWarning, match=r"could not leave the device.*memory is not saved.*Disk\(path\)"):
        entry = put_in_vain(store, tensor, saved=4000)
    assert totals(store) == (4000, 4000, 4000, 0)
    for _ in range(2):
        assert torch.equal(get(store, entry, tensor), tensor)
    assert str(entry.account.note) == "kept: disk failed"


def put_in_vain(store, tensor, saved=0):
    """A put to disk whose write fails, and is seen to fail."""
    entry = put(store, tensor, "disk", saved=saved)
    with suppress(TransferError):
        entry.room.parcel.motion.wait_on(None)
    store.poll()
    return entry


@pytest.mark.parametrize("tier", TIERS)
def test_a_codec_that_fails_books_nothing(make, tier, monkeypatch):
    store = make()
    tensor = torch.randn(1000)
    entry = put(store, tensor, tier)
    route = entry.account.route

    def fail(*_):
        raise RuntimeError("planted")

    good = route.bound
    bad = good._replace(encode=fail) if hasattr(good, "_replace") else type(good)(good.nbytes, fail, good.decode)
    monkeypatch.setattr(route, "bound", bad)
    monkeypatch.setattr(type(route), "fits", lambda *_: True)
    del entry
    drain(store)
    before = totals(store)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="planted"):
            put(store, tensor, tier, saved=4000)
    assert totals(store) == before


def test_a_read_that_fails_frees_its_memory_and_can_be_repeated(make):
    store = make()
    tier = wrap(store, "disk", lambda tier: Faulty(tier, "read"))
    tensor = torch.randn(1000)
    entry = put(store, tensor, "disk")
    land(store, entry)
    for _ in range(3):
        with pytest.raises(TransferError, match="planted fault of read"):
            get(store, entry, tensor)
    tier.faults.clear()
    assert torch.equal(get(store, entry, tensor), tensor)


def test_a_disk_that_breaks_loses_nothing(make, monkeypatch):
    store = make()
    store.open(CPU, ["disk"])

    def fail(*_):
        raise OSError(5, os.strerror(5))

    tensor = torch.randn(1000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        with pytest.warns(RuntimeWarning, match="writing .* to the disk tier failed"):
            entry = put_in_vain(store, tensor)
    assert torch.equal(get(store, entry, tensor), tensor)


def test_altered_bytes_on_disk(make):
    store = make()
    entry = put(store, torch.randn(1000), "disk")
    land(store, entry)
    place = entry.room.parcel.slot.place
    fd = os.open(f"/proc/self/fd/{place.file._fd}", os.O_WRONLY)  # without O_DIRECT, which takes whole pages
    os.pwrite(fd, b"\xff" * 10, place.start)
    os.close(fd)
    with pytest.raises(PayloadError, match="another checksum"):
        get(store, entry, torch.randn(1000))


# -- the end ----------------------------------------------------------------------------------------------------------


def test_close_returns_everything(make):
    store = make()
    tensor = torch.randn(1000)
    entries = [put(store, tensor, tier) for tier in TIERS]
    store.remember([__import__("weakref").ref(entry) for entry in entries])
    store.close()
    assert totals(store)[2:] == (0, 0)
    for entry in entries:
        with pytest.raises(StateError, match="closed before backward"):
            get(store, entry, tensor)
    with pytest.raises(StateError, match="Make a new ActivationStore"):
        put(store, tensor, "device")
    store.close()


def test_entries_that_close_does_not_know(make):
    store = make()
    tensor = torch.randn(1000)
    entries = [put(store, tensor, tier) for tier in TIERS]
    store.close()
    with pytest.raises(StateError):
        get(store, entries[2], tensor)
    del entries
    assert totals(store)[2:] == (0, 0)


def test_a_tier_of_another_kind_is_always_asked_for_room(make):
    class Full(DeviceTier):
        def reserve(self, nbytes):
            return None

    store = make()
    store.place(CPU)._open["device"] = Full(Cpu(CPU))
    assert put(store, torch.randn(1000), "device") is None


def test_payloads_of_variable_size_take_the_place_of_what_is_gone(make):
    store = make()
    entries = [put(store, torch.randn(1000), "device") for _ in range(4)]
    pool = store.place(CPU).pool("device")
    assert pool.used_nbytes == 16_000
    entries.clear()
    entry = put(store, torch.randn(1000), "device", codec=Zmask())
    assert pool.used_nbytes + pool.idle_nbytes <= 16_000
    del entry


def test_close_while_writes_are_late(make):
    store = make()
    slow = wrap(store, "disk", lambda tier: Slow(tier, 0.02))
    entries = [put(store, torch.randn(1000), "disk") for _ in range(5)]
    del entries[2:]
    store.close()
    del entries
    gc.collect()
    assert slow.writes <= 5
    assert totals(store)[2:] == (0, 0)


def test_a_step_returns_what_the_last_one_did_not_need(make):
    store = make()

    def step(count):
        store.start()
        entries = [put(store, torch.randn(1000), "device") for _ in range(count)]
        pool = store._places[CPU]._open["device"].pool
        assert pool.used_nbytes == 4000 * count
        del entries
        store.ledger.settle()
        return pool.idle_nbytes

    assert step(10) == 40_000
    step(2)
    assert step(2) == 8000


@pytest.mark.parametrize("readers", [1, 3])
def test_a_fetched_payload_stays_until_its_last_reader(make, readers):
    store, tensor = make(), torch.randn(2**16)
    entry = put(store, tensor, "disk")
    for _ in range(readers - 1):
        entry.add_reader()
    land(store, entry)
    for reader in range(readers):
        back = torch.empty_like(tensor)
        store.get(entry, back)
        assert torch.equal(back, tensor)
        assert (entry.room.parcel.state is ParcelState.RESIDENT) == (reader == readers - 1)
    assert entry.account.misses == 1


def test_a_payload_beside_the_engine_has_any_number_of_readers(make):
    store, tensor = make(), torch.randn(100)
    entry = put(store, tensor, "device")
    entry.add_reader()
    for _ in range(3):
        back = torch.empty_like(tensor)
        store.get(entry, back)
        assert torch.equal(back, tensor)
