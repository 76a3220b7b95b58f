"""The disk tier past host memory: with a kvikio that only pretends, on devices that only pretend, and with kvikio."""

import os
import sys
import threading
import types

import pytest
import torch

from actstore import ActivationStore, Disk, Window
from actstore.base.checksum import checksum
from actstore.devices import Cpu
from actstore.errors import ConfigError, PayloadError, StateError, TransferError
from actstore.testing.tiers import check_tier, load, pattern, store
from actstore.tiers.disk import DiskTier
from actstore.tiers.parts import Ring
from tests.autograd.checks import check_drained, check_same, train_step
from tests.autograd.models import build
from tests.devices.late import LateDevice
from tests.simulation import TraceOperators, here, simulation
from tests.transfer.programs import PAGE, small_memory

CHUNK = 2 * PAGE


class CuFile:
    """What the tier uses of `kvikio.CuFile`, on CPU tensors.

    `fault` is raised by each transfer; `taken` is the most that one takes; `gate` holds transfers back.
    """

    files: list["CuFile"]
    fault = None
    taken = None
    gate = None

    def __init__(self, path, flags):
        assert flags == "r+"
        self.fd = os.open(path, os.O_RDWR)
        self.calls = self.reads = 0
        self.files.append(self)

    def raw_write(self, buf, size, file_offset):
        return os.pwrite(self.fd, self._begin(buf, size), file_offset)

    def raw_read(self, buf, size, file_offset):
        self.reads += 1
        return os.preadv(self.fd, [self._begin(buf, size)], file_offset)

    def close(self):
        os.close(self.fd)
        self.fd = None

    def _begin(self, buf, size):
        assert self.fd is not None, "used after close"
        self.calls += 1
        if self.gate is not None:
            self.gate()
        if self.fault is not None:
            raise self.fault
        return buf[:size].numpy().data[: self.taken]


@pytest.fixture
def kvikio(monkeypatch):
    """A kvikio of CPU memory, with GPUDirect Storage."""
    names = "kvikio", "kvikio.cufile_driver", "kvikio.defaults"
    module, driver, defaults = map(types.ModuleType, names)
    files: list[CuFile] = []
    module.CuFile = type("CuFile", (CuFile,), {"files": files})
    module.cufile_driver, module.defaults = driver, defaults
    module.direct = {"is_gds_available": True}
    driver.get = module.direct.__getitem__
    defaults.is_compat_mode_preferred = lambda: False
    for name, each in zip(names, (module, driver, defaults), strict=True):
        monkeypatch.setitem(sys.modules, name, each)
    monkeypatch.setattr(Ring, "chunk_nbytes", CHUNK)
    yield module
    assert [file for file in files if file.fd is not None] == [], "not closed"


@pytest.fixture
def simulated(monkeypatch, kvikio):
    """The simulation below the store, which also sees checksums."""

    def traced(memory):
        here().compute(reads=[memory], what="a checksum")
        return checksum(memory)

    small_memory(monkeypatch)
    monkeypatch.setattr("actstore.tiers.gpu_direct.checksum", traced)


@pytest.fixture
def device():
    return LateDevice()


@pytest.fixture
def tier(disk_folder, kvikio, device):
    tier = DiskTier(disk_folder, device, gpu_direct=True)
    yield tier
    tier.close()


# -- the bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_contract_without_host_memory(disk_folder, kvikio, seed):
    device = LateDevice(seed)
    check_tier(DiskTier(disk_folder, device, gpu_direct=True))
    assert kvikio.CuFile.files[0].calls > 0
    assert device.sizes == []


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("policy", ["raw @ disk", "expack @ disk"])
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_gradients_are_those_of_plain_autograd_and_all_is_ordered(disk_folder, kvikio, name, policy):
    model, batch = build(name)
    wanted = train_step(model, batch)
    for seed in range(3):
        with simulation(seed) as device, TraceOperators(device):
            device.scheduler.host_may_wait = True
            store = ActivationStore(
                model, policy, min_bytes=0, tiers=[Disk(disk_folder, gpu_direct=True), Window(2 * PAGE)]
            )
            for _ in range(3):
                check_same(train_step(model, batch, store), wanted)
            check_drained(store)
            assert store.report().live_bytes == 0
            store.close()
    assert sum(file.reads for file in kvikio.CuFile.files) > 0


def test_the_file_of_kvikio_is_the_file_without_a_name(tier, kvikio):
    slot = store(tier, pattern(5000, 1))
    ours, theirs = os.fstat(slot.place.file._fd), os.fstat(kvikio.CuFile.files[0].fd)
    assert (ours.st_dev, ours.st_ino, theirs.st_nlink) == (theirs.st_dev, theirs.st_ino, 0)
    tier.free(slot)


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_write_that_is_short(tier, kvikio):
    kvikio.CuFile.taken = 100
    slot = tier.reserve(CHUNK)
    with pytest.raises(TransferError, match=r"writing 8.0 KiB .* took 100 bytes and no more.*gpu_direct=True out"):
        tier.write(slot, pattern(CHUNK, 1)).result()
    tier.free(slot)


def test_errors_of_kvikio(tier, kvikio):
    slot = store(tier, pattern(5000, 1))
    kvikio.CuFile.fault = RuntimeError("cuFile error: device pointer invalid")
    with pytest.raises(TransferError, match=r"reading 4.9 KiB .* cuFile error: device pointer invalid.*gdscheck"):
        load(tier, slot)
    other = tier.reserve(5000)
    with pytest.raises(TransferError, match=r"writing 4.9 KiB .* cuFile error") as caught:
        tier.write(other, pattern(5000, 2)).result()
    assert caught.value.errno
    kvikio.CuFile.fault = None
    assert torch.equal(load(tier, slot), pattern(5000, 1))
    tier.free(slot)
    tier.free(other)


def test_altered_and_missing_bytes(tier, kvikio):
    slot, fd = store(tier, pattern(5000, 1)), kvikio.CuFile.files[0].fd
    os.pwrite(fd, b"\0\1\2", slot.place.start + 4500)
    with pytest.raises(PayloadError, match=r"5000 bytes came back .* another checksum .*Disk\(path\)"):
        load(tier, slot)
    os.ftruncate(fd, 3000)
    with pytest.raises(PayloadError, match="ends after 3000 of 5000 bytes"):
        load(tier, slot)
    tier.free(slot)


@pytest.mark.usefixtures("simulated")
def test_a_store_whose_disk_fails_keeps_its_payloads_on_the_device(disk_folder, kvikio):
    model, batch = build("mlp")
    wanted = train_step(model, batch)
    kvikio.CuFile.fault = RuntimeError("cuFile error: 5030")
    with simulation(1) as device, TraceOperators(device):
        device.scheduler.host_may_wait = True
        store = ActivationStore(model, "raw @ disk", min_bytes=0, tiers=[Disk(disk_folder, gpu_direct=True)])
        with pytest.warns(RuntimeWarning, match="cuFile error: 5030"):
            check_same(train_step(model, batch, store), wanted)
        check_drained(store)
        store.close()


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["write", "read"])
def test_close_waits_for_what_is_under_way(tier, kvikio, what):
    slot = store(tier, pattern(CHUNK, 1))
    go, inside = threading.Event(), threading.Event()

    def gate():
        inside.set()
        assert go.wait(120)

    kvikio.CuFile.gate = staticmethod(gate)
    if what == "read":
        ticket = tier.read(slot, torch.zeros(CHUNK, dtype=torch.uint8))
    else:
        late = tier.reserve(CHUNK)
        ticket = tier.write(late, pattern(CHUNK, 2))
    assert inside.wait(120)
    closing = threading.Thread(target=tier.close)
    closing.start()
    while not slot.place.file.closed:
        pass
    assert closing.is_alive()
    go.set()
    closing.join(120)
    assert not closing.is_alive()
    if what == "read":
        with pytest.raises(StateError, match="closed"):
            ticket.result()
    else:
        ticket.result()
        tier.free(late)
    with pytest.raises(StateError, match="closed"):
        load(tier, slot)
    tier.free(slot)


def test_a_forked_child_is_refused(tier, kvikio, monkeypatch):
    slot = store(tier, pattern(5000, 1))
    calls = kvikio.CuFile.files[0].calls
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        for use in (lambda: tier.reserve(10), lambda: tier.write(slot, pattern(5000, 2)), lambda: load(tier, slot)):
            with pytest.raises(StateError, match=r"forked child.*parent, or start the process by spawn"):
                use()
        assert len(kvikio.CuFile.files) == 1
        assert kvikio.CuFile.files[0].calls == calls
    assert torch.equal(load(tier, slot), pattern(5000, 1))
    tier.free(slot)


def test_a_forked_child_that_closes_leaves_the_file_of_kvikio_alone(disk_folder, kvikio, device, monkeypatch):
    tier = DiskTier(disk_folder, device, gpu_direct=True)
    opened, here = kvikio.CuFile.files[0], tier._open
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        tier.close()
    assert opened.fd is not None
    here.close()


# -- what must be there -----------------------------------------------------------------------------------------------


def test_without_the_package(disk_folder, device, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ConfigError, match=r"kvikio, which cannot be imported .*pip install 'actstore\[gds13\]'"):
        DiskTier(disk_folder, device, gpu_direct=True)


@pytest.mark.usefixtures("kvikio")
def test_on_a_cpu(disk_folder):
    with pytest.raises(ConfigError, match=r"the compute device is cpu. Move the model to the GPU"):
        DiskTier(disk_folder, Cpu(torch.device("cpu")), gpu_direct=True)
    model, _ = build("mlp")
    with pytest.raises(ConfigError, match=r"the compute device is cpu"):
        ActivationStore(model, "raw @ disk", tiers=[Disk(disk_folder, gpu_direct=True)])
    ActivationStore(model, "int8", tiers=[Disk(gpu_direct=True)]).close()


@pytest.mark.usefixtures("kvikio")
def test_without_a_model_the_device_is_seen_at_the_first_payload(disk_folder):
    store = ActivationStore(policy="raw @ disk", min_bytes=0, tiers=[Disk(disk_folder, gpu_direct=True)])
    x = torch.randn(100, requires_grad=True)
    with pytest.raises(ConfigError, match="the compute device is cpu"), store:
        x.exp().sin()
    store.close()


def test_a_file_that_kvikio_cannot_open(disk_folder, device, kvikio, monkeypatch):
    def refuse(path, flags):
        raise RuntimeError("Unable to open file.")

    monkeypatch.setattr(kvikio, "CuFile", refuse)
    with pytest.raises(ConfigError, match=r"cannot open the disk tier's file: Unable to open file.. Give Disk\(path\)"):
        DiskTier(disk_folder, device, gpu_direct=True)


@pytest.mark.parametrize("missing", ["driver", "cuFile"])
def test_a_warning_where_there_is_no_gpudirect_storage(disk_folder, device, kvikio, missing):
    if missing == "driver":
        kvikio.direct["is_gds_available"] = False
    else:
        kvikio.defaults.is_compat_mode_preferred = lambda: True
    with pytest.warns(RuntimeWarning, match=r"copies through host memory: load .*nvidia-fs.*gpu_direct=True out"):
        tier = DiskTier(disk_folder, device, gpu_direct=True)
    tier.close()


class Claims(torch.Tensor):
    """Memory of the host that says it is a GPU's."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": tuple(self.shape), "typestr": "|u1", "data": (self.data_ptr(), False), "version": 2}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests of CUDA move bytes")
def test_kvikio_itself_opens_a_file_without_a_name_and_its_errors_are_told(disk_folder, device):
    pytest.importorskip("kvikio")
    with pytest.warns(RuntimeWarning, match="kvikio finds no GPUDirect Storage here"):
        tier = DiskTier(disk_folder, device, gpu_direct=True)
    slot = tier.reserve(5000)
    ours, theirs = (os.fstat(fd) for fd in (slot.place.file._fd, tier._open.mover._cufile.fileno()))
    assert (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
    with pytest.raises(TransferError, match=r"with kvikio failed: .*gpu_direct=True out"):
        tier.write(slot, pattern(5000, 1).as_subclass(Claims)).result()
    tier.free(slot)
    tier.close()
