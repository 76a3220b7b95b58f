"""The disk tier: nothing with a name, nothing lost in silence, nothing left over."""

import errno
import fcntl
import gc
import os
import resource
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actstore.base.ticket import JobTicket, Ticket
from actstore.devices import Cpu, Device
from actstore.errors import ConfigError, PayloadError, StateError, TransferError
from actstore.testing.tiers import check_tier, pattern
from actstore.tiers.disk import WORKERS, DiskTier
from actstore.tiers.file import NamelessFile, digest, warn_if_memory
from actstore.tiers.parts import Ring

CPU = Cpu(torch.device("cpu"))
CHUNK = 2 * 4096


class Apart(Device):
    """A device whose memory is not the host's. Copies run on a thread for each stream, when `go` is set."""

    on_host = False

    def __init__(self, may_pin=True):
        self.torch_device = torch.device("cpu")
        self.go, self.may_pin, self.fails = threading.Event(), may_pin, False
        self.go.set()
        self.pinned_now = self.pinned_most = 0
        self.streams = []

    def current(self):
        return None

    def on(self, stream):
        raise AssertionError("the disk tier does not touch the compute stream")

    record = mark = wait = on

    def stream(self):
        self.streams.append(ThreadPoolExecutor(1))
        return self.streams[-1]

    def empty(self, nbytes):
        return torch.empty(nbytes + 1, dtype=torch.uint8)[1:]

    def pinned(self, nbytes):
        if not self.may_pin:
            return None
        self.pinned_now += 1
        self.pinned_most = max(self.pinned_most, self.pinned_now)
        return CPU.pinned(nbytes)

    def unpin(self, memory):
        memory.fill_(0xEE)
        self.pinned_now -= 1

    def copy(self, dst, src, stream, after=()):
        def run():
            begin = perf_counter_ns()
            assert self.go.wait(120)
            for ticket in after:
                ticket.wait_on(None)
            if self.fails:
                raise RuntimeError("the link is down")
            dst.copy_(src)
            return begin, perf_counter_ns()

        return JobTicket([stream.submit(run)])

    def workers(self, count, name):
        return ThreadPoolExecutor(count, thread_name_prefix=name)

    def shutdown(self):
        for stream in self.streams:
            stream.shutdown()


def fail_with(code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


def refuse(monkeypatch, way):
    """Have the file system refuse what it may refuse."""
    if way == "nameless at open":
        real = os.open

        def unsupported(path, flags, *rest, **options):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *rest, **options)

        monkeypatch.setattr(os, "open", unsupported)
    elif way == "direct at open":
        setting = fcntl.fcntl

        def without(fd, command, flags=0):
            if command == fcntl.F_SETFL and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return setting(fd, command, flags)

        monkeypatch.setattr(fcntl, "fcntl", without)
    elif way == "direct at first use":
        for name in ("pwritev", "preadv"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name)))


def refusing(real):
    def call(fd, views, at):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, views, at)

    return call


@pytest.fixture
def apart():
    device = Apart()
    yield device
    device.go.set()
    device.shutdown()


@pytest.fixture(params=["host", "apart"])
def device(request):
    """Memory of the host, which the system calls touch, and other memory, which they do not."""
    return CPU if request.param == "host" else request.getfixturevalue("apart")


@pytest.fixture
def tier(disk_folder):
    tier = DiskTier(disk_folder, CPU)
    yield tier
    tier.close()


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(Ring, "chunk_nbytes", CHUNK)


class Gate:
    """Holds back system calls until `open`."""

    def __init__(self, monkeypatch, name="pwritev"):
        self.may_go, self._begun, self._calls = threading.Event(), threading.Semaphore(0), []
        real = getattr(os, name)

        def call(*args):
            self._calls.append(args)
            self._begun.release()
            assert self.may_go.wait(120)
            return real(*args)

        monkeypatch.setattr(os, name, call)

    @property
    def calls(self):
        return len(self._calls)

    def wait_for(self, calls=1):
        """Wait until so many more have begun."""
        for _ in range(calls):
            assert self._begun.acquire(timeout=20)

    def open(self):
        self.may_go.set()


class Use(Ticket):
    """Somebody's work on memory, done when it is waited for."""

    def __init__(self, work):
        self.work, self.done = work, False

    def ready(self):
        return self.done

    def wait_on(self, stream):
        self.work()
        self.done = True

    def result(self):
        self.wait_on(None)


def begin(tier, payload, after=()):
    """Start a write from page-aligned memory."""
    slot = tier.reserve(payload.numel())
    source = CPU.empty(payload.numel())
    source.copy_(payload)
    return slot, tier.write(slot, source, after)


def store(tier, payload):
    slot, ticket = begin(tier, payload)
    ticket.result()
    return slot


def load(tier, slot):
    found = CPU.empty(slot.nbytes)
    tier.read(slot, found).result()
    return found


def other_way(fd):
    """The file through a descriptor of its own, which takes any number of bytes."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR)


def fd_of(slot):
    return slot.place.file._fd


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["", "nameless at open"])
def test_the_file_has_no_name_and_is_private(disk_folder, monkeypatch, way):
    refuse(monkeypatch, way)
    tier = DiskTier(disk_folder, CPU)
    slot = store(tier, pattern(10_000, 1))
    found = os.fstat(fd_of(slot))
    assert (found.st_mode & 0o777, found.st_nlink) == (0o600, 0)
    assert not os.get_inheritable(fd_of(slot))
    assert list(disk_folder.iterdir()) == []
    tier.free(slot)
    tier.close()


@pytest.mark.parametrize("way", ["", "nameless at open", "direct at open", "direct at first use"])
def test_contract(disk_folder, monkeypatch, device, way):
    refuse(monkeypatch, way)
    tier = DiskTier(disk_folder, device)
    slot = store(tier, pattern(4096, 1))
    assert slot.place.file.direct or way.startswith("direct")
    tier.free(slot)
    check_tier(tier)
    assert device is CPU or device.pinned_now == 0


def test_a_direct_file_is_direct(tier):
    """On the file systems of the machines that run this; a change to buffered I/O would go unseen otherwise."""
    slot = store(tier, pattern(5000, 1))
    direct = fcntl.fcntl(fd_of(slot), fcntl.F_GETFL) & os.O_DIRECT
    assert bool(direct) is slot.place.file.direct
    tier.free(slot)


def test_direct_io_refused_at_open_or_use_is_over(disk_folder, monkeypatch):
    for way in ("direct at open", "direct at first use"):
        with monkeypatch.context() as patch:
            refuse(patch, way)
            tier = DiskTier(disk_folder, CPU)
            slot = store(tier, pattern(5000, 1))
            assert not slot.place.file.direct
            assert torch.equal(load(tier, slot), pattern(5000, 1))
            tier.free(slot)
            tier.close()


def test_a_tier_that_is_forgotten_leaves_nothing(disk_folder):
    others = set(threading.enumerate())
    tier = DiskTier(disk_folder, CPU)
    slot = store(tier, pattern(100, 1))
    fd, alive = fd_of(slot), weakref.ref(slot.place.file)
    tier.free(slot)
    del tier, slot
    gc.collect()
    for thread in set(threading.enumerate()) - others:  # the workers end by themselves
        thread.join(120)
    assert alive() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_trim_returns_what_the_last_step_did_not_need(tier):
    def step(count):
        slots = [store(tier, pattern(4096, i)) for i in range(count)]
        for slot in slots:
            tier.free(slot)
        tier.trim()
        return os.fstat(fd_of(slots[0])).st_size

    assert step(8) == 8 * 4096
    assert step(2) == 2 * 4096
    assert step(4) == 4 * 4096


def test_the_bytes_in_use(tier):
    first, second = store(tier, pattern(1, 1)), store(tier, pattern(4097, 2))
    assert (tier.room(0), tier.room(1), tier.room(4097)) == (4096, 4096, 8192)
    assert tier.used_nbytes == tier.room(1) + tier.room(4097)
    tier.free(second)
    assert tier.used_nbytes == tier.room(1)
    tier.free(first)
    assert tier.used_nbytes == 0
    tier.close()
    assert tier.used_nbytes == 0


# -- parts, chunks and any memory -------------------------------------------------------------------------------------


OFFSETS = st.sampled_from([0, 1, 64, 4032, 4095, 4096])


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 5 * CHUNK), OFFSETS, OFFSETS), min_size=1, max_size=6), st.booleans())
def test_any_length_at_any_address(small_chunks, disk_folder, device, payloads, buffered):
    tier = DiskTier(disk_folder, device)
    held, direct = [], None
    for seed, (nbytes, offset, other) in enumerate(payloads):
        source = CPU.empty(offset + nbytes)[offset:]
        source.copy_(pattern(nbytes, seed))
        slot = tier.reserve(nbytes + 5000)  # longer than what is written
        if buffered:
            slot.place.file.direct = slot.place.file._set_direct(False)
        direct = slot.place.file.direct if direct is None else direct
        held.append((slot, source, (offset, other), tier.write(slot, source)))
    for seed, (slot, source, offsets, ticket) in enumerate(held):
        for offset in offsets:
            around = CPU.empty(offset + source.numel() + 9)
            around.fill_(0x5A)
            end = offset + source.numel()
            tier.read(slot, around[offset:end]).result()
            assert torch.equal(around[offset:end], pattern(source.numel(), seed))
            assert (around[:offset] == 0x5A).all()
            assert (around[end:] == 0x5A).all()
        assert ticket.ready()
        tier.free(slot)
    assert held[0][0].place.file.direct is direct, "a system call was refused"
    assert tier.used_nbytes == 0
    tier.close()


@pytest.mark.usefixtures("small_chunks")
def test_chunks_are_few_and_wait_for_the_copies_out_of_them(disk_folder, apart):
    tier = DiskTier(disk_folder, apart)
    payload = pattern(20 * CHUNK + 77, 1)
    slot = store(tier, payload)
    apart.go.clear()
    found = torch.zeros_like(payload)
    ticket = tier.read(slot, found)
    assert not ticket.ready()
    assert not found.any()
    apart.go.set()
    ticket.result()
    assert torch.equal(found, payload)
    first, last = ticket.span()
    assert first < last
    assert 1 < apart.pinned_most <= Ring.chunks
    tier.free(slot)
    tier.close()
    assert apart.pinned_now == 0


@pytest.mark.usefixtures("small_chunks")
def test_a_ring_makes_no_more_chunks_than_it_may(apart):
    ring, waited = Ring(apart), []
    chunks = [ring.take() for _ in range(Ring.chunks)]
    busy = [Use(lambda i=i: waited.append(i)) for i in range(Ring.chunks)]
    for chunk, ticket in zip(chunks, busy, strict=True):
        ring.give(chunk, ticket)
    busy[2].done = True
    assert ring.take() is chunks[2]  # nothing uses it
    assert ring.take() is chunks[0]  # the longest idle, which the host waits for
    assert waited == [2, 0]
    assert apart.pinned_now == Ring.chunks
    ring.close()
    assert sorted(waited) == list(range(Ring.chunks))
    assert apart.pinned_now == 0


@pytest.mark.usefixtures("small_chunks")
def test_reads_that_wait_for_the_device_leave_chunks_to_writes(disk_folder, apart):
    """All copies to the device wait for a write: were chunks taken for good, none of the two could go on."""
    tier = DiskTier(disk_folder, apart)
    payload = pattern(10 * CHUNK, 1)
    old = store(tier, payload)
    new, written = begin(tier, payload)
    found = torch.zeros_like(payload)
    read = tier.read(old, found, [written])
    thread = threading.Thread(target=read.result, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive(), "deadlock"
    assert torch.equal(found, payload)
    tier.free(old)
    tier.free(new)
    tier.close()


@pytest.mark.usefixtures("small_chunks")
def test_pinned_memory_refused(disk_folder):
    device = Apart(may_pin=False)
    check_tier(DiskTier(disk_folder, device))
    device.shutdown()


@pytest.mark.usefixtures("small_chunks")
def test_a_copy_that_fails(disk_folder, apart):
    tier = DiskTier(disk_folder, apart)
    good = store(tier, pattern(CHUNK, 1))
    apart.fails = True
    for _ in range(Ring.chunks + 1):
        slot, ticket = begin(tier, pattern(CHUNK, 2))
        with pytest.raises(TransferError, match="the link is down"):
            ticket.result()
        tier.free(slot)
        with pytest.raises(TransferError, match="the link is down"):
            load(tier, good)
    apart.fails = False
    assert torch.equal(load(tier, good), pattern(CHUNK, 1))
    tier.free(good)
    tier.close()
    assert apart.pinned_now == 0


# -- the folder -------------------------------------------------------------------------------------------------------


def test_a_missing_folder(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(
        ConfigError, match=r"missing'\) cannot hold the disk tier: No such file.*folder that you may"
    ) as e:
        DiskTier(missing, CPU)
    assert e.value.folder == str(missing)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot hold the disk tier: Not a directory"):
        DiskTier(tmp_path / "file", CPU)


@pytest.mark.parametrize(("code", "text"), [(errno.EACCES, "Permission denied"), (errno.EROFS, "Read-only")])
def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, code, text):
    monkeypatch.setattr(os, "open", fail_with(code))  # permissions do not stop root, who runs some tests
    with pytest.raises(ConfigError, match=f"cannot hold the disk tier: {text}"):
        DiskTier(tmp_path, CPU)


def test_a_folder_in_memory():
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no tmpfs here")
    with pytest.warns(RuntimeWarning, match=r"'/dev/shm' lies in memory \(tmpfs\).*Disk\(path\)"):
        tier = DiskTier("/dev/shm", CPU)
    slot = store(tier, pattern(5000, 1))
    assert torch.equal(load(tier, slot), pattern(5000, 1))
    tier.free(slot)
    tier.close()


def test_a_folder_on_a_disk(monkeypatch, tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("tmpfs / tmpfs rw 0 0\n/dev/sda /my\\040disk ext4 rw 0 0\n")
    monkeypatch.setattr("actstore.tiers.file.Path", lambda _: mounts)
    warn_if_memory("/my disk/folder")
    with pytest.warns(RuntimeWarning, match="lies in memory"):
        warn_if_memory("/my")


# -- a full disk, a broken one ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_a_refusal_that_takes_nothing(tier, monkeypatch, code):
    first = store(tier, pattern(4096, 1))
    tier.trim()
    before = os.fstat(fd_of(first)).st_size
    real = os.posix_fallocate

    def half(fd, start, nbytes):
        real(fd, start, nbytes // 2)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", half)
        assert tier.reserve(2**20) is None
        assert os.fstat(fd_of(first)).st_size == before == 4096
    assert torch.equal(load(tier, first), pattern(4096, 1))
    second = store(tier, pattern(2**20, 2))
    assert second.place.start == 4096
    assert torch.equal(load(tier, second), pattern(2**20, 2))
    tier.free(first)
    tier.free(second)


def test_the_last_bytes_below_a_limit_of_the_system_can_be_had(tier):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        assert tier.reserve(2**16 + 1) is None
        slot = store(tier, pattern(2**16, 1))
        assert tier.reserve(1) is None
        assert torch.equal(load(tier, slot), pattern(2**16, 1))
        tier.free(slot)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_another_failure_to_reserve_is_an_error_that_takes_nothing(tier, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail_with(errno.EIO))
        with pytest.raises(TransferError, match=r"reserving .* failed: .*Input/output error.*Disk\(path\)") as caught:
            tier.reserve(100)
    assert caught.value.errno == errno.EIO
    slot = tier.reserve(100)
    assert slot.place.start == 0
    tier.free(slot)


@pytest.mark.parametrize("step", [4096, 1000])
def test_short_writes_and_short_reads_go_on(tier, monkeypatch, step):
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0][:step]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:step]], at))
    slot = store(tier, pattern(10_001, 1))
    assert torch.equal(load(tier, slot), pattern(10_001, 1))
    assert slot.place.file.direct is (step == 4096)  # what is no block is not written past the page cache
    tier.free(slot)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_is_told_at_each_read_and_not_before(disk_folder, device, monkeypatch, code):
    tier = DiskTier(disk_folder, device)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail_with(code))
        slot, ticket = begin(tier, pattern(5000, 1))
        with pytest.raises(TransferError):
            ticket.wait_on(None)
    errors = []
    for act in (ticket.result, lambda: load(tier, slot), lambda: load(tier, slot)):
        with pytest.raises(
            TransferError, match=r"^writing 8.0 KiB to the disk tier failed after 0 bytes: .*Disk\(path\)"
        ) as e:
            act()
        assert e.value.errno == code
        e.value.add_context("while decoding something")
        errors.append(e.value)
    assert len(set(map(id, errors))) == 3
    other = store(tier, pattern(5000, 2))
    assert torch.equal(load(tier, other), pattern(5000, 2))
    tier.free(slot)
    tier.free(other)
    tier.close()


def test_a_write_of_which_nothing_is_taken(tier, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: 0)
        slot, ticket = begin(tier, pattern(4096, 1))
        with pytest.raises(TransferError, match="failed after 0 bytes: it takes no more"):
            ticket.result()
    tier.free(slot)


def test_an_error_of_invalid_arguments_is_told_once_direct_io_is_over(tier, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail_with(errno.EINVAL))
        slot, ticket = begin(tier, pattern(4096, 1))
        with pytest.raises(TransferError, match="Invalid argument"):
            ticket.result()
    tier.free(slot)


def test_a_failed_read(tier, monkeypatch):
    slot = store(tier, pattern(5000, 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail_with(errno.EIO))
        with pytest.raises(TransferError, match=r"reading 4.9 KiB .* failed after 0 bytes.*Disk\(path\)") as caught:
            load(tier, slot)
    assert caught.value.errno == errno.EIO
    assert torch.equal(load(tier, slot), pattern(5000, 1))
    tier.free(slot)


def test_altered_bytes(disk_folder, device):
    tier = DiskTier(disk_folder, device)
    slot = store(tier, pattern(5000, 1))
    fd = other_way(fd_of(slot))
    os.pwrite(fd, b"\0\1\2", slot.place.start + 4500)
    os.close(fd)
    with pytest.raises(PayloadError, match=r"5000 bytes .*another checksum.*Disk\(path\)"):
        load(tier, slot)
    tier.free(slot)
    tier.close()


def test_a_truncated_file(disk_folder, device):
    tier = DiskTier(disk_folder, device)
    slot = store(tier, pattern(5000, 1))
    os.ftruncate(fd_of(slot), 3000)
    with pytest.raises(PayloadError, match="ends after 3000 of 5000 bytes") as caught:
        load(tier, slot)
    assert (caught.value.expected, caught.value.found) == (5000, 3000)
    tier.free(slot)
    tier.close()


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
def test_a_job_that_dies_is_told_and_the_workers_go_on(disk_folder, device, monkeypatch, call, error):
    def die(*_):
        raise error

    tier = DiskTier(disk_folder, device)
    good = store(tier, pattern(5000, 1))
    for _ in range(2 * WORKERS + 1):  # more than there are workers, and chunks
        with monkeypatch.context() as patch:
            patch.setattr(os, call, die)
            slot, ticket = begin(tier, pattern(5000, 2))
            with pytest.raises(TransferError, match=error.__name__):
                (ticket if call == "pwritev" else tier.read(good, CPU.empty(5000))).result()
            if call == "preadv":
                ticket.result()
        tier.free(slot)
    assert torch.equal(load(tier, good), pattern(5000, 1))
    tier.free(good)
    tier.close()


# -- the order --------------------------------------------------------------------------------------------------------


def test_nobody_waits_and_a_read_waits_for_its_write(disk_folder, device, monkeypatch):
    tier = DiskTier(disk_folder, device)
    gate = Gate(monkeypatch)
    slot, written = begin(tier, pattern(5000, 1))
    found = CPU.empty(5000)
    read = tier.read(slot, found)
    gate.wait_for()
    assert not written.ready()
    assert not read.ready()
    assert written.span() is None
    gate.open()
    read.result()
    assert torch.equal(found, pattern(5000, 1))
    assert written.ready()
    (begin_ns, end_ns), (_, read_ns) = written.span(), read.span()
    assert begin_ns < end_ns < read_ns
    tier.free(slot)
    tier.close()


def test_a_read_does_not_queue_behind_writes(tier, monkeypatch):
    old = store(tier, pattern(5000, 1))
    gate = Gate(monkeypatch)
    held = [begin(tier, pattern(100, i)) for i in range(8)]
    assert torch.equal(load(tier, old), pattern(5000, 1))
    assert not any(ticket.ready() for _, ticket in held)
    gate.open()
    for slot, ticket in held:
        ticket.result()
        tier.free(slot)
    tier.free(old)


def test_what_comes_after_something_does(disk_folder, device):
    tier = DiskTier(disk_folder, device)
    source, found = CPU.empty(5000), CPU.empty(5000)
    source.zero_()
    made, used = Use(lambda: source.copy_(pattern(5000, 1))), Use(lambda: found.fill_(7))
    slot = tier.reserve(5000)
    tier.write(slot, source, iter([made])).result()
    tier.read(slot, found, iter([used])).result()
    assert made.done
    assert used.done
    assert torch.equal(found, pattern(5000, 1))
    tier.free(slot)
    tier.close()


def test_a_read_of_something_else_than_was_written(tier):
    slot = tier.reserve(10_000)
    with pytest.raises(StateError, match="before it was given one"):
        tier.read(slot, CPU.empty(10)).result()
    tier.write(slot, pattern(5000, 1)).result()
    with pytest.raises(StateError, match="asked for 4000 bytes of a payload of 5000"):
        tier.read(slot, CPU.empty(4000)).result()
    tier.free(slot)


# -- late writes ------------------------------------------------------------------------------------------------------


def test_what_is_dropped_is_not_written_and_not_read(tier, monkeypatch):
    gate = Gate(monkeypatch)
    held = [begin(tier, pattern(100, i)) for i in range(WORKERS + 4)]
    found = CPU.empty(100)
    reads = [tier.read(slot, found) for slot, _ in held[1:4]]
    gate.wait_for(WORKERS)  # all of them are at work, so no other write has begun
    assert not any(ticket.ready() for ticket in [*reads, *(ticket for _, ticket in held)])
    for slot, _ in held[:-1]:
        tier.free(slot)
    gate.open()
    assert torch.equal(load(tier, held[-1][0]), pattern(100, len(held) - 1))
    for ticket in [*reads, *(ticket for _, ticket in held)]:
        ticket.result()
    assert gate.calls == WORKERS + 1
    tier.free(held[-1][0])


def test_a_read_that_is_dropped_leaves_the_memory_alone(tier, monkeypatch):
    old = [store(tier, pattern(100, i)) for i in range(WORKERS + 1)]
    gate, found = Gate(monkeypatch, "preadv"), torch.full((100,), 7, dtype=torch.uint8)
    first = [tier.read(slot, CPU.empty(100)) for slot in old[:-1]]
    late = tier.read(old[-1], found)
    gate.wait_for(WORKERS)
    for slot in old:
        tier.free(slot)
    gate.open()
    for ticket in [*first, late]:
        ticket.result()
    assert gate.calls == WORKERS
    assert (found == 7).all()


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_range_is_not_used_again_while_a_job_is_at_work_on_it(tier, monkeypatch, call):
    payload = pattern(100, 1)
    if call == "preadv":
        old = store(tier, payload)
        gate = Gate(monkeypatch, call)
        found = CPU.empty(100)
        ticket = tier.read(old, found)
    else:
        gate = Gate(monkeypatch, call)
        old, ticket = begin(tier, payload)
    gate.wait_for()
    tier.free(old)
    new = tier.reserve(100)
    assert new.place.start != old.place.start
    gate.open()
    ticket.result()
    again = tier.reserve(100)
    assert again.place.start == old.place.start
    if call == "preadv":
        assert torch.equal(found, payload)
    tier.free(new)
    tier.free(again)
    assert tier.used_nbytes == 0


def test_a_slot_freed_in_a_finalizer_while_the_lock_is_held(tier):
    class Owner:
        def __init__(self, slot):
            self.slot, self.me = slot, self

        def __del__(self):
            tier.free(self.slot)

    def work():
        for i in range(4):
            Owner(store(tier, pattern(100, i)))
            with tier._lock:
                gc.collect()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive(), "deadlock"


# -- the end ----------------------------------------------------------------------------------------------------------


def test_after_close_nothing_is_read_and_the_number_is_not_used_again(disk_folder, tmp_path):
    tier = DiskTier(disk_folder, CPU)
    payload = pattern(5000, 1)
    slot = store(tier, payload)
    fd = fd_of(slot)
    tier.close()
    assert os.fstat(fd).st_size == 0  # the bytes are back, the number is not
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.write(other, bytes(payload.tolist()))
    assert other != fd
    with pytest.raises(StateError, match="the disk tier is closed"):
        load(tier, slot)
    with pytest.raises(StateError, match="the disk tier is closed"):
        tier.write(slot, payload)
    tier.free(slot)
    del slot, tier
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    os.close(other)


@pytest.mark.usefixtures("small_chunks")
def test_close_while_reads_are_under_way(disk_folder, device, monkeypatch):
    tier = DiskTier(disk_folder, device)
    slot = store(tier, pattern(10 * CHUNK, 1))
    gate = Gate(monkeypatch, "preadv")
    ticket = tier.read(slot, CPU.empty(10 * CHUNK))
    gate.wait_for()
    closing = threading.Thread(target=tier.close)
    closing.start()
    while not slot.place.file.closed:
        pass
    gate.open()
    closing.join(120)
    assert not closing.is_alive()
    with pytest.raises(StateError, match="closed"):
        ticket.result()
    assert gate.calls <= WORKERS
    tier.free(slot)


def test_close_skips_what_is_not_written_yet(disk_folder, monkeypatch):
    tier = DiskTier(disk_folder, CPU)
    gate = Gate(monkeypatch)
    held = [begin(tier, pattern(100, 1)) for _ in range(3 * WORKERS)]
    gate.wait_for()
    closing = threading.Thread(target=tier.close)
    closing.start()
    while not held[0][0].place.file.closed:
        pass
    gate.open()
    closing.join(120)
    assert not closing.is_alive()
    assert gate.calls <= WORKERS
    for slot, ticket in held:
        ticket.wait_on(None)
        ticket.result()
        with pytest.raises(StateError, match="closed"):
            load(tier, slot)
        tier.free(slot)


@pytest.mark.parametrize(
    ("raised", "error", "text"),
    [
        (StateError("no job can begin after shutdown"), StateError, "no more work: no job can begin"),
        (RuntimeError("can't start new thread"), TransferError, "no thread to work with: can't start new thread"),
    ],
    ids=["closed", "refused"],
)
def test_workers_that_take_no_more_leave_nobody_at_work_on_the_source(
    tier, monkeypatch, small_chunks, raised, error, text
):
    first = begin(tier, pattern(100, 1))
    workers = tier._open.writers
    submit, ended = workers.submit, []

    def last(*args):
        if ended:
            raise raised
        ended.append(submit(*args))
        return ended[0]

    monkeypatch.setattr(workers, "submit", last)
    slot = tier.reserve(4 * CHUNK)
    with pytest.raises(error, match=text):
        tier.write(slot, pattern(4 * CHUNK, 2))
    assert ended[0].done()
    tier.free(slot)
    tier.free(first[0])


def test_a_read_that_gets_no_thread_can_be_had_again(tier, monkeypatch, small_chunks):
    slot = store(tier, pattern(4 * CHUNK, 1))
    with monkeypatch.context() as patch:
        patch.setattr(tier._open.readers, "submit", no_thread)
        with pytest.raises(TransferError, match="ulimit -u"):
            load(tier, slot)
    assert torch.equal(load(tier, slot), pattern(4 * CHUNK, 1))
    tier.free(slot)


def no_thread(*_):
    raise RuntimeError("can't start new thread")


def test_a_file_by_itself(disk_folder):
    file = NamelessFile(disk_folder)
    assert file.reserve(10)
    file.write([memoryview(b"01234"), memoryview(b"56789")], 0)
    back = bytearray(10)
    file.read([memoryview(back)[:3], memoryview(back)[3:]], 0, 10)
    assert back == b"0123456789"
    file.verify(memoryview(back), digest(memoryview(b"0123456789")))
    file.shrink(5)
    assert file.reserve(5)
    with pytest.raises(PayloadError, match="ends after 5 of 10"):
        file.read([memoryview(back)], 0, 10)
    file.close()
