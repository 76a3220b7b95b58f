"""Payloads of variable size, and the keys of random bits: room for just the bytes there are, and nobody waits."""

from dataclasses import dataclass
from random import Random

import pytest
import torch

from actstore import Disk, Host
from actstore.base.spec import Site
from actstore.codecs import AtMost, Codec, Expack, Int8, Intpack, Zmask, Zstd
from actstore.errors import CapacityError
from actstore.store.payload import Payload
from actstore.store.store import Store
from actstore.store.tierset import StoreOptions
from actstore.tiers import Slot
from actstore.transfer.parcel import ParcelState
from tests.contracts.clean import all_freed
from tests.simulation import install, simulation
from tests.tiers.conftest import disk_folder

__all__ = ["all_freed", "disk_folder"]

CPU = torch.device("cpu")
NUMEL = 4000


@dataclass(frozen=True)
class Counted(Codec):
    """Bytes up to the last one that is not zero, behind their length."""

    name = "counted"
    lossless = True

    def accepts(self, dtype):
        return dtype is torch.uint8

    def size(self, spec):
        return AtMost(16 + spec.numel)

    def encode(self, src, out, key=0):
        kept = int(src.nonzero()[-1]) + 1 if src.any() else 0
        out[:16].zero_()
        out[:8].view(torch.int64).fill_(16 + kept)
        out[16 : 16 + kept] = src[:kept]
        return 16 + kept

    def decode(self, buf, out, key=0):
        kept = int(buf[:8].view(torch.int64)) - 16
        out.zero_()
        out[:kept] = buf[16 : 16 + kept]


class Owned(Payload):
    __slots__ = ()

    def __init__(self, store, site=0):
        super().__init__(store.ledger.account(Site("m", site)))


def source(kept, value=7):
    tensor = torch.zeros(NUMEL, dtype=torch.uint8)
    tensor[:kept] = value
    return tensor


@pytest.fixture
def store(disk_folder):
    store = Store(StoreOptions({"disk": Disk(disk_folder, 8192), "host": Host(3000)}))
    yield store
    store.close()
    assert [(a.held, a.away) for a in store.ledger.accounts() if a.held or a.away] == []


def put(store, tensor, *tiers, codec=None, site=0):
    entry, forward = Owned(store, site), store.begin(CPU)
    route = store.route(entry.account, tensor, codec or Counted(), tiers)
    found = store.put(entry, tensor, route, tensor.numel(), forward)
    store.end(forward)
    return entry if found else None


def tier_of(entry):
    if entry is None or isinstance(entry.room, torch.Tensor):
        return entry and "device"
    return (entry.room if isinstance(entry.room, Slot) else entry.room.parcel).tier.name


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("kept", [0, 1, 100, 2000])
def test_a_payload_takes_the_room_that_it_needs(store, tier, kept):
    entry = put(store, source(kept), tier)
    (account,) = store.ledger.accounts()
    assert account.stored == 16 + kept
    assert 16 + kept <= entry.room.nbytes <= (16 + kept) * 17 / 16 + 16
    if tier == "disk":
        entry.room.parcel.motion.wait_on(None)
    store.poll()
    assert (account.held, account.away) == ((0, entry.room.nbytes) if tier == "disk" else (entry.room.nbytes, 0))
    assert account.peak == 16 + NUMEL + (entry.room.nbytes if tier == "disk" else 0)
    out = torch.empty(NUMEL, dtype=torch.uint8)
    for _ in range(2):
        store.get(entry, out.fill_(3))
        assert torch.equal(out, source(kept))


def test_the_ladder_is_asked_for_what_there_is(store):
    entries = [put(store, source(kept), "host", "disk", site=i) for i, kept in enumerate([2000, 800, 3000, 3900, 10])]
    assert [tier_of(entry) for entry in entries] == ["host", "host", "disk", "disk", "host"]


def test_no_room_leaves_nothing(store):
    first = put(store, source(2500), "host")
    assert put(store, source(2500), "host", site=1) is None
    strict = Store(StoreOptions({"host": Host(100)}, strict=True))
    with pytest.raises(CapacityError, match=r"no room for .* in host"):
        put(strict, source(2500), "host")
    assert [(a.saved, a.stored, a.held) for a in strict.ledger.accounts()] == [(0, 0, 0)]
    strict.close()
    accounts = store.ledger.accounts()
    assert [(a.saved, a.held) for a in accounts] == [(NUMEL, first.room.nbytes), (0, 0)]


def test_a_codec_that_fails_leaves_nothing(store):
    class Broken(Counted):
        def encode(self, src, out, key=0):
            raise MemoryError("planted")

    with pytest.raises(MemoryError, match="planted"):
        put(store, source(5), "host", codec=Broken())
    assert [(a.saved, a.held) for a in store.ledger.accounts()] == [(0, 0)]


def test_a_tier_that_fails_leaves_nothing(store, monkeypatch):
    store.open(CPU, ["disk"])
    tier = store._places[CPU].tier("disk")

    def fail(*_):
        raise OSError("planted")

    monkeypatch.setattr(getattr(tier, "tier", tier), "reserve", fail)
    with pytest.raises(OSError, match="planted"):
        put(store, source(5), "disk")
    assert [(a.saved, a.stored, a.held, a.away) for a in store.ledger.accounts()] == [(0, 0, 0, 0)]


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("seed", range(12))
def test_a_device_tells_the_length_later_and_the_host_never_waits(monkeypatch, disk_folder, tier, seed):
    install(monkeypatch)
    random = Random(seed)
    kept = [random.randrange(NUMEL) for _ in range(6)]
    with simulation(seed) as device:
        store, entries = Store(StoreOptions({"disk": Disk(disk_folder)})), []

        def fetch(i):
            out = torch.empty(NUMEL, dtype=torch.uint8)
            store.get(entries[i], out)
            device.compute(reads=[out], what="backward")
            assert torch.equal(out, source(kept[i], 1 + i))

        for i, n in enumerate(kept):
            src = source(n, 1 + i)
            device.compute(writes=[src], what="forward")
            entries.append(put(store, src, tier, site=i))
            device.compute(writes=[src], what="it may change at once")
            src.fill_(99)
            if i == 3:
                entries[0] = None
        for i in (4, 2, 5):
            if tier != "disk":  # a read from disk is a wait for it
                fetch(i)
        device.finish()
        device.scheduler.host_may_wait = True
        for _ in range(3):
            store.poll()
            device.finish()
        for i, entry in enumerate(entries):
            if entry is not None:
                assert tier_of(entry) == tier
                assert (
                    isinstance(entry.room, Slot) or entry.room.parcel.state is not ParcelState.OPEN
                )  # it left, though late
                assert 16 + kept[i] <= entry.room.nbytes <= (16 + kept[i]) * 17 / 16 + 16
                fetch(i)
        stored = [account.stored for account in store.ledger.accounts()]
        assert stored[0] in (0, 16 + kept[0])  # it may have gone before its length was known
        assert stored[1:] == [16 + n for n in kept[1:]]
        entries.clear()
        del entry
        store.close()
        assert [(a.held, a.away) for a in store.ledger.accounts() if a.held or a.away] == []
        assert device.held_nbytes == (0, 0)


@pytest.mark.parametrize("other_stream", [False, True])
def test_a_payload_may_be_moved_while_another_thread_reads_it(monkeypatch, disk_folder, other_stream):
    install(monkeypatch)
    for seed in range(60):
        with simulation(seed) as device:
            store = Store(StoreOptions({"disk": Disk(disk_folder), "host": Host(8192)}))
            src = source(3000)
            device.compute(writes=[src], what="forward")
            entries = [put(store, src, "host", "device", site=i) for i in range(4)]
            made = device.record(device.current())

            def look(store=store):
                for _ in range(6):
                    store.poll()

            looking, stream = device.scheduler.spawn(look), device.current()
            if other_stream:
                stream = device.compute_stream()
                made.wait_on(stream)

            def read(device=device, store=store, entries=entries):
                for entry in entries:
                    out = torch.empty(NUMEL, dtype=torch.uint8)
                    store.get(entry, out)
                    device.compute(reads=[out], what="backward")
                    assert torch.equal(out, source(3000))

            reading = device.scheduler.spawn(read, stream=stream)
            looking.result()
            reading.result()
            entries.clear()
            del read, look
            device.scheduler.host_may_wait = True
            store.close()


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("codec", [Expack(), Intpack(), Zmask(), Zstd()], ids=lambda codec: codec.name)
def test_what_has_no_elements_has_no_length_to_wait_for(disk_folder, codec, tier, verify):
    store = Store(StoreOptions({"disk": Disk(disk_folder)}, verify=verify))
    tensor = torch.empty(0, 3, dtype=torch.int64 if codec.name == "intpack" else torch.float32)
    entry = put(store, tensor, tier, codec=codec)
    store.get(entry, torch.empty_like(tensor))
    entry.free()
    store.close()


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_what_has_no_elements_on_a_device(monkeypatch, disk_folder, tier):
    install(monkeypatch)
    for seed in range(5):
        with simulation(seed) as device:
            store = Store(StoreOptions({"disk": Disk(disk_folder)}))
            entry = put(store, torch.empty(0), tier, codec=Expack())
            device.finish()
            device.scheduler.host_may_wait = True
            store.get(entry, torch.empty(0))
            del entry
            assert store.ledger.held == 0
            store.close()


# -- keys -------------------------------------------------------------------------------------------------------------


def keys(store, sites, codec=Int8(round="stochastic")):  # noqa: B008 - a value
    found = []
    for site in sites:
        entry, tensor = Owned(store, site), torch.ones(64)
        route = store.route(entry.account, tensor, codec, ("device",))
        store.put(entry, tensor, route, 0, store.begin(CPU))
        found.append(entry.key)
    return found


def test_the_same_program_gives_the_same_keys_and_no_two_alike(store):
    def program(store):
        found = []
        for _ in range(2):
            store.start()
            found += keys(store, [0, 1, 0, 0])
        return found

    first = program(store)
    assert len(set(first)) == 8
    assert all(0 <= key < 1 << 63 for key in first)
    assert program(Store(StoreOptions())) == first
    assert not set(program(Store(StoreOptions(seed=1)))) & set(first)


def test_codecs_without_random_bits_get_no_key(store):
    assert keys(store, [0, 0], Int8()) == [0, 0]


def test_dither_comes_back_with_the_key_of_its_payload(store):
    tensor = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    codec = Int8(round="dither")
    entries = [put(store, tensor, "device", codec=codec, site=0) for _ in range(2)]
    backs = [torch.empty_like(tensor) for _ in entries]
    for entry, back in zip(entries, backs, strict=True):
        store.get(entry, back)
        assert (back - tensor).norm() / tensor.norm() < 0.01
    assert not torch.equal(*backs)
