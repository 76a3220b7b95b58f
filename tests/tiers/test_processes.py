"""Other ends of a process: killed, forked, left with work in flight."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = """
import os, sys, threading, time, warnings
warnings.simplefilter("ignore")
import torch
from actstore.errors import PayloadError, StateError
from actstore.tiers import DiskTier
from actstore.transfer import Transfer
from tests.contracts.tiers import load, pattern, store
folder = sys.argv[1]
tier = DiskTier(folder, None)
pwrite, hold, inside = os.pwrite, threading.Event(), threading.Event()
"""


@pytest.fixture
def start(disk_folder):
    """Run a script with a disk tier in a process of its own."""
    started = []

    def start(body):
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD + body, str(disk_folder)],
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
    print("writing", flush=True)
    time.sleep(60)
os.pwrite = slow
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
    assert process.wait(20) == -signal.SIGKILL
    assert list(disk_folder.iterdir()) == []


def test_an_exit_with_pending_writes_does_not_hang(start):
    process = start("""
def slow(*args):
    time.sleep(0.01)
    return pwrite(*args)
os.pwrite = slow
transfer = Transfer(torch.device("cpu"))
for i in range(20):
    transfer.offload(tier, tier.reserve(2**18), pattern(2**18, i), lambda buffer: None)
print("leaving")
""")
    assert finish(process) == ["leaving"]


def test_a_fork(start):
    process = start("""
def gated(fd, view, at):
    if len(view) == 3333:
        print("late", flush=True)
        inside.set()
        assert hold.wait(30)
    return pwrite(fd, view, at)
os.pwrite = gated
transfer = Transfer(torch.device("cpu"))
written = [store(tier, pattern(10_000, i)) for i in range(3)]
late = tier.reserve(3333)
transfer.offload(tier, late, pattern(3333, 7), lambda buffer: print("landed", flush=True))
assert inside.wait(30)
sys.stdout.flush()
child = os.fork()
if child == 0:
    try:
        transfer.drain()  # returns: nobody writes here what the parent has under way
        assert torch.equal(load(tier, written[0]), pattern(10_000, 0))
        try:
            load(tier, late)
        except StateError as error:
            assert "run backward in the parent" in str(error)
        else:
            raise AssertionError
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
assert torch.equal(load(tier, late), pattern(3333, 7))
transfer.drain()
# A child that closes its copy at once leaves the parent's bytes alone too.
child = os.fork()
if child == 0:
    tier.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(load(tier, late), pattern(3333, 7))
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
    assert finish(process) == ["late", "landed", "child", "landed", "parent"]
