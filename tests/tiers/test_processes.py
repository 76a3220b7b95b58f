"""Other ends of a process: killed, forked, left with work in flight."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = """
import os, threading, time, warnings
warnings.simplefilter("ignore")
import torch
from actstore.devices import Cpu
from actstore.errors import PayloadError, StateError
from actstore.tiers.disk import DiskTier
from actstore.testing.tiers import load, pattern, store
folder = sys.argv[1]
tier = DiskTier(folder, Cpu(torch.device("cpu")))
pwritev, hold, inside = os.pwritev, threading.Event(), threading.Event()
"""


@pytest.fixture
def start(disk_folder):
    """Run a script with a disk tier in a process of its own."""
    started = []

    def start(body, before=""):
        process = subprocess.Popen(
            [sys.executable, "-c", f"import sys\n{before}\n{HEAD}{body}", str(disk_folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err == ""
    return out.split()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at the process's open files")
def test_a_killed_process_leaves_nothing(start, disk_folder):
    process = start("""
def slow(*args):
    os.write(1, b"writing\\n")  # in one piece, whichever worker comes first
    time.sleep(60)
os.pwritev = slow
slots = [tier.reserve(2**20) for _ in range(8)]
for slot in slots:
    tier.write(slot, torch.zeros(2**20, dtype=torch.uint8))
time.sleep(60)
""")
    assert process.stdout.readline() == "writing\n"
    opened = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert any(str(disk_folder) in path and "(deleted)" in path for path in opened)
    assert list(disk_folder.iterdir()) == []
    process.send_signal(signal.SIGKILL)
    assert process.wait(120) == -signal.SIGKILL
    assert list(disk_folder.iterdir()) == []


def test_an_exit_with_pending_writes_does_not_hang(start):
    process = start("""
def slow(*args):
    time.sleep(0.01)
    return pwritev(*args)
os.pwritev = slow
for i in range(20):
    tier.write(tier.reserve(2**18), pattern(2**18, i))
print("leaving")
""")
    assert finish(process) == ["leaving"]


def test_a_fork(start):
    process = start("""
def gated(fd, views, at):
    if sum(map(len, views)) == 28672:
        print("late", flush=True)
        inside.set()
        assert hold.wait(120)
    return pwritev(fd, views, at)
os.pwritev = gated
written = [store(tier, pattern(10_000, i)) for i in range(3)]
early, late = tier.reserve(100), tier.reserve(28672)
pending = tier.write(late, pattern(28672, 7))
assert inside.wait(120)
sys.stdout.flush()
child = os.fork()
if child == 0:
    try:
        for wait in (pending.result, lambda: load(tier, late)):  # nobody writes here what the parent has under way
            try:
                wait()
            except StateError as error:
                assert "Run backward in the parent" in str(error)
            else:
                raise AssertionError
        try:
            tier.write(early, pattern(100, 1))
        except StateError as error:
            assert "forked" in str(error)
        else:
            raise AssertionError
        assert torch.equal(load(tier, written[0]), pattern(10_000, 0))
        tier.free(written[1])  # of the parent: means nothing here
        mine = [store(tier, pattern(50_000, 100 + i)) for i in range(3)]
        assert mine[0].place.file is not written[0].place.file
        for i, slot in enumerate(mine):
            assert torch.equal(load(tier, slot), pattern(50_000, 100 + i))
        for slot in mine:
            tier.free(slot)
        tier.close()
        print("child", flush=True)
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
assert os.waitpid(child, 0)[1] == 0
hold.set()
for i, slot in enumerate(written):
    assert torch.equal(load(tier, slot), pattern(10_000, i))
assert torch.equal(load(tier, late), pattern(28672, 7))
pending.result()
# A child that closes its copy at once leaves the parent's bytes alone too.
child = os.fork()
if child == 0:
    tier.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(load(tier, late), pattern(28672, 7))
# A child that reads too late is told so.
r, w = os.pipe()
child = os.fork()
if child == 0:
    os.read(r, 1)
    try:
        load(tier, written[0])
    except PayloadError as error:
        os._exit(0 if "run backward in the parent" in str(error) else 2)
    os._exit(3)
tier.free(written[0])
assert torch.equal(load(tier, store(tier, pattern(10_000, 9))), pattern(10_000, 9))
os.write(w, b"x")
assert os.waitpid(child, 0)[1] == 0
print("parent")
""")
    assert finish(process) == ["late", "child", "parent"]


def test_without_xxhash(start):
    """zlib's checksum stands in."""
    process = start(
        """
import zlib
from actstore.tiers import file, parts
assert file.digest is parts.digest is zlib.crc32
slot = store(tier, pattern(10_000, 1))
assert torch.equal(load(tier, slot), pattern(10_000, 1))
raw = os.open(f"/proc/self/fd/{slot.place.file._fd}", os.O_RDWR)
os.pwrite(raw, bytes(3), slot.place.start + 9_000)
try:
    load(tier, slot)
except PayloadError as error:
    print("altered")
""",
        before='sys.modules["xxhash"] = None',
    )
    assert finish(process) == ["altered"]
