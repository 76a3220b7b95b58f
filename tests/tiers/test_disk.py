"""The disk tier: nothing with a name, nothing lost in silence, nothing left over."""

import errno
import gc
import os
import resource
import threading
import weakref

import pytest
import torch

from actstore.errors import ConfigError, PayloadError, StateError, TransferError
from actstore.tiers import DiskTier
from actstore.tiers.file import NamelessFile, warn_if_memory
from tests.contracts.tiers import check_tier, load, pattern, store


@pytest.fixture(params=["O_TMPFILE", "mkstemp"])
def way(request, monkeypatch):
    """Both ways to a nameless file."""
    if request.param == "mkstemp":
        real = os.open

        def unsupported(path, flags, *rest, **options):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *rest, **options)

        monkeypatch.setattr(os, "open", unsupported)


@pytest.fixture
def tier(disk_folder):
    tier = DiskTier(disk_folder, None)
    yield tier
    tier.close()


class Gate:
    """Holds back the writes of the worker until `open`."""

    def __init__(self, monkeypatch):
        self.entered, self.may_go, self.writes = threading.Event(), threading.Event(), 0
        real = os.pwrite

        def pwrite(*args):
            self.writes += 1
            self.entered.set()
            assert self.may_go.wait(20)
            return real(*args)

        monkeypatch.setattr(os, "pwrite", pwrite)

    def open(self):
        self.may_go.set()


def fail_with(code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
def test_the_file_has_no_name_and_is_private(disk_folder):
    tier = DiskTier(disk_folder, None)
    slot = store(tier, pattern(10_000, 1))
    slot.written.result()
    found = os.fstat(tier._file._fd)
    assert (found.st_mode & 0o777, found.st_nlink) == (0o600, 0)
    assert not os.get_inheritable(tier._file._fd)
    assert list(disk_folder.iterdir()) == []
    tier.free(slot)
    tier.close()


@pytest.mark.usefixtures("way")
def test_contract_of_both_ways(disk_folder):
    check_tier(DiskTier(disk_folder, None))


def test_a_tier_that_is_forgotten_leaves_nothing(disk_folder):
    tier = DiskTier(disk_folder, None)
    slot = store(tier, pattern(100, 1))
    fd, alive = tier._file._fd, weakref.ref(tier._file)
    tier.free(slot)
    del tier, slot
    gc.collect()
    for thread in threading.enumerate():  # the worker ends by itself
        if thread.name.startswith("actstore-disk"):
            thread.join(10)
    assert alive() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_trim_returns_what_the_last_step_did_not_need(tier):
    def step(count):
        slots = [store(tier, pattern(4096, i)) for i in range(count)]
        for slot in slots:
            slot.written.result()
            tier.free(slot)
        tier.trim()
        return os.fstat(tier._file._fd).st_size

    assert step(8) == 8 * 4096
    assert step(2) == 2 * 4096
    assert step(4) == 4 * 4096


# -- the folder -------------------------------------------------------------------------------------------------------


def test_a_missing_folder(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(
        ConfigError, match=r"missing' cannot hold the disk tier: No such file.*folder that you may"
    ) as e:
        DiskTier(missing, None)
    assert e.value.folder == str(missing)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot hold the disk tier: Not a directory"):
        DiskTier(tmp_path / "file", None)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", fail_with(errno.EACCES))  # permissions do not stop root, who runs some tests
    with pytest.raises(ConfigError, match="cannot hold the disk tier: Permission denied"):
        DiskTier(tmp_path, None)


def test_a_folder_in_memory():
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no tmpfs here")
    with pytest.warns(RuntimeWarning, match=r"'/dev/shm' lies in memory \(tmpfs\).*disk_path="):
        tier = DiskTier("/dev/shm", None)
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
    real = os.posix_fallocate

    def half(fd, start, nbytes):
        real(fd, start, nbytes // 2)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", half)
        assert tier.reserve(2**20) is None
        assert os.fstat(tier._file._fd).st_size == 4096
    assert torch.equal(load(tier, first), pattern(4096, 1))
    second = store(tier, pattern(2**20, 2))
    assert second.place.start == 4096
    assert torch.equal(load(tier, second), pattern(2**20, 2))
    tier.free(first)
    tier.free(second)


def test_a_limit_of_the_system_is_a_refusal(tier):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        assert tier.reserve(2**20) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_another_failure_to_reserve_is_an_error_that_takes_nothing(tier, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail_with(errno.EIO))
        with pytest.raises(TransferError, match=r"reserving .* failed: .*Input/output error") as caught:
            tier.reserve(100)
    assert caught.value.errno == errno.EIO
    slot = tier.reserve(100)
    assert slot.place.start == 0
    tier.free(slot)


def test_short_writes_and_short_reads_go_on(tier, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: pwrite(fd, view[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:777]], at))
    slot = store(tier, pattern(10_001, 1))
    assert torch.equal(load(tier, slot), pattern(10_001, 1))
    tier.free(slot)


def test_a_failed_write_is_told_at_each_read_and_not_before(tier, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail_with(errno.EIO))
        slot = store(tier, pattern(5000, 1))
    errors = []
    for _ in range(2):
        with pytest.raises(TransferError, match=r"^writing 4.9 KiB to the disk tier failed after 0 bytes.*error$") as e:
            load(tier, slot)
        assert e.value.errno == errno.EIO
        e.value.add_context("while decoding something")
        errors.append(e.value)
    assert errors[0] is not errors[1]
    other = store(tier, pattern(5000, 2))
    assert torch.equal(load(tier, other), pattern(5000, 2))
    tier.free(slot)
    tier.free(other)


def test_a_failed_read(tier, monkeypatch):
    slot = store(tier, pattern(5000, 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail_with(errno.EIO))
        with pytest.raises(TransferError, match=r"reading 4.9 KiB .* failed after 0 bytes") as caught:
            load(tier, slot)
    assert caught.value.errno == errno.EIO
    assert torch.equal(load(tier, slot), pattern(5000, 1))
    tier.free(slot)


def test_altered_bytes(tier):
    slot = store(tier, pattern(5000, 1))
    slot.written.result()
    os.pwrite(tier._file._fd, b"\0\1\2", slot.place.start + 4000)
    with pytest.raises(PayloadError, match=r"another checksum.*disk_path="):
        load(tier, slot)
    tier.free(slot)


def test_a_truncated_file(tier):
    slot = store(tier, pattern(5000, 1))
    slot.written.result()
    os.ftruncate(tier._file._fd, 3000)
    with pytest.raises(PayloadError, match="ends after 3000 of 5000 bytes") as caught:
        load(tier, slot)
    assert (caught.value.expected, caught.value.found) == (5000, 3000)
    tier.free(slot)


# -- late writes ------------------------------------------------------------------------------------------------------


def test_what_is_dropped_is_not_written(tier, monkeypatch):
    gate = Gate(monkeypatch)
    slots = [tier.reserve(100) for _ in range(4)]
    sources = [pattern(100, i) for i in range(4)]
    tickets = [tier.write(slot, source) for slot, source in zip(slots, sources, strict=True)]
    assert gate.entered.wait(20)
    assert not any(ticket.ready() for ticket in tickets)
    for slot in slots[:3]:
        tier.free(slot)
    gate.open()
    assert torch.equal(load(tier, slots[3]), pattern(100, 3))
    assert all(ticket.ready() for ticket in tickets)
    assert gate.writes == 2  # the first was under way
    tier.free(slots[3])


def test_a_range_is_not_used_again_while_it_is_written(tier, monkeypatch):
    gate = Gate(monkeypatch)
    old = tier.reserve(100)
    ticket = tier.write(old, pattern(100, 1))
    assert gate.entered.wait(20)
    tier.free(old)
    new = tier.reserve(100)
    assert new.place.start != old.place.start
    gate.open()
    ticket.result()
    deadline = threading.Event()
    for _ in range(100):  # the callback runs soon after the result is there
        again = tier.reserve(100)
        tier.free(again)
        if again.place.start == old.place.start:
            break
        deadline.wait(0.01)
    assert again.place.start == old.place.start
    tier.free(new)


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
    thread.join(20)
    assert not thread.is_alive(), "deadlock"


# -- the end ----------------------------------------------------------------------------------------------------------


def test_after_close_nothing_is_read_and_the_number_is_not_used_again(disk_folder, tmp_path):
    tier = DiskTier(disk_folder, None)
    payload = pattern(5000, 1)
    slot = store(tier, payload)
    slot.written.result()
    fd = tier._file._fd
    tier.close()
    assert os.fstat(fd).st_size == 0  # the bytes are back, the number is not
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.write(other, bytes(payload.tolist()))
    assert other != fd
    with pytest.raises(StateError, match="the disk tier was closed"):
        load(tier, slot)
    with pytest.raises(StateError, match="no more writes"):
        tier.write(slot, payload)
    tier.free(slot)
    del slot, tier
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    os.close(other)


def test_close_while_a_read_is_under_way(disk_folder, monkeypatch):
    tier = DiskTier(disk_folder, None)
    slot = store(tier, pattern(5000, 1))
    slot.written.result()
    real = os.preadv

    def close_first(*args):
        tier.close()
        return real(*args)

    monkeypatch.setattr(os, "preadv", close_first)
    with pytest.raises(StateError, match="closed"):
        load(tier, slot)
    tier.free(slot)


def test_close_skips_what_is_not_written_yet(disk_folder, monkeypatch):
    tier = DiskTier(disk_folder, None)
    gate = Gate(monkeypatch)
    slots = [tier.reserve(100) for _ in range(5)]
    tickets = [tier.write(slot, pattern(100, 1)) for slot in slots]
    assert gate.entered.wait(20)
    closing = threading.Thread(target=tier.close)
    closing.start()
    while not slots[0].place.file.closed:
        pass
    gate.open()
    closing.join(20)
    assert not closing.is_alive()
    assert gate.writes == 1
    for ticket in tickets:
        ticket.wait_on(None)
        ticket.result()
    for slot in slots:
        with pytest.raises(StateError, match="closed"):
            load(tier, slot)
        tier.free(slot)


def test_a_file_by_itself(disk_folder):
    file = NamelessFile(disk_folder)
    assert file.reserve(10)
    crc = file.write(memoryview(b"0123456789"), 0)
    back = bytearray(10)
    file.read(memoryview(back), 0, crc)
    assert back == b"0123456789"
    file.shrink(5)
    assert file.reserve(5)
    with pytest.raises(PayloadError, match="ends after 5 of 10"):
        file.read(memoryview(back), 0, crc)
    file.close()
