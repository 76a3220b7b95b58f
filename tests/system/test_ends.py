"""Interrupts, forks and other ends of a process, with bytes on their way to disk and back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEAD = """
import gc, os, signal, sys, threading, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "the disk tier's folder", RuntimeWarning)
import torch
from torch import nn
from actstore import ActivationStore, Disk, Window
from tests.autograd.checks import check_drained, check_same, train_step

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 8))
batch = (torch.randn(4096, 64),)
wanted = train_step(model, batch)
store = ActivationStore(model, "raw @ disk", min_bytes=0, tiers=[Disk(sys.argv[1]), Window(sys.argv[2])])

def forward():
    with store:
        return model(*batch).square().mean()

def grads(loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}

class Gate:
    '''A system call that says when it is called, and then waits to be let through.'''

    def __init__(self, name):
        self.call, self.inside, self.open = getattr(os, name), threading.Event(), threading.Event()
        self.error = None
        setattr(os, name, self)

    def __call__(self, *args):
        self.inside.set()
        assert self.open.wait(120)
        if self.error is not None:
            raise self.error
        return self.call(*args)

def say(text):
    os.write(1, text.encode() + b"\\n")

def check_usable():
    gc.collect()
    check_drained(store)
    for _ in range(2):
        check_same(train_step(model, batch, store), wanted)
    gc.collect()
    check_drained(store)
    store.close()
    gc.collect()
    assert threading.active_count() == 1, threading.enumerate()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Run a script after HEAD in a process of its own."""
    started = []

    def start(body: str, window: str = "64MiB") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD + body, str(folder), window],
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


def finish(process: subprocess.Popen[str], said: str, code: int = 0) -> None:
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert err == ""
    assert out.split() == said.split()


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------

INTERRUPT = """
main = threading.main_thread()

def waits():
    '''Whether the main thread sits in a wait for a job.'''
    frame, names = sys._current_frames()[main.ident], set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return "_finish_jobs" in names

def interrupt():
    assert gate.inside.wait(120)
    while not waits():
        pass
    while not interrupted.wait(0.1):  # one that comes just before the wait begins does not wake it
        os.kill(os.getpid(), signal.SIGINT)
    gate.open.set()

interrupted = threading.Event()

def handler(number, frame):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupted.set()
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, handler)
"""


def test_an_interrupt_while_forward_waits_for_the_disk(start):
    process = start(
        INTERRUPT
        + """
gate = Gate("pwritev")
sender = threading.Thread(target=interrupt)
sender.start()
try:
    forward()
except KeyboardInterrupt:
    say("interrupted")
sender.join()
check_usable()
say("usable")
""",
        window="1MiB",
    )
    finish(process, "interrupted usable")


def test_an_interrupt_while_backward_waits_for_the_disk(start):
    process = start(
        INTERRUPT
        + """
loss = forward()
gate = Gate("preadv")
sender = threading.Thread(target=interrupt)
sender.start()
try:
    loss.backward(retain_graph=True)
except KeyboardInterrupt:
    say("interrupted")
sender.join()
check_same(grads(loss), wanted.grads)  # the same graph again
del loss
check_usable()
say("usable")
""",
        window="1MiB",
    )
    finish(process, "interrupted usable")


def test_an_interrupt_that_nobody_catches(start):
    process = start(
        INTERRUPT + "gate = Gate('pwritev')\nthreading.Thread(target=interrupt).start()\nforward()\n", "1MiB"
    )
    _, err = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGINT
    assert err.endswith("KeyboardInterrupt\n")
    assert "StateError" not in err


# -- fork -------------------------------------------------------------------------------------------------------------


def test_a_fork_between_forward_and_backward(start):
    """Both run backward; the child trains on, with a file of its own."""
    process = start(
        """
loss = forward()
check_same(train_step(model, batch, store), wanted)
for window in store._store._places[batch[0].device].engine._traffic.quota.windows.values():
    for parcel in window.flights:  # a child cannot wait for its parent's writes
        parcel.motion.result()
child = os.fork()
if child == 0:
    code = 1
    try:
        check_same(grads(loss), wanted.grads)
        del loss
        for _ in range(2):
            check_same(train_step(model, batch, store), wanted)
        store.close()
        say("child")
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
check_same(grads(loss), wanted.grads)
del loss
check_usable()
say("parent")
"""
    )
    finish(process, "child parent")


def test_a_fork_with_writes_under_way(start):
    """What has not left the parent's device is in the child's memory too; the child never waits for the parent."""
    process = start(
        """
gate = Gate("pwritev")
loss = forward()
assert gate.inside.wait(120)
child = os.fork()
if child == 0:
    code = 1
    try:
        gate.open.set()
        check_same(grads(loss), wanted.grads)
        check_same(train_step(model, batch, store), wanted)
        store.close()
        say("child")
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
gate.open.set()
check_same(grads(loss), wanted.grads)
del loss
check_usable()
say("parent")
"""
    )
    finish(process, "child parent")


def test_a_child_that_ends_as_python_does(start):
    """Its exit waits for no thread of the parent, and leaves the parent's bytes alone."""
    process = start(
        """
gate = Gate("pwritev")
loss = forward()
assert gate.inside.wait(120)
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
gate.open.set()
check_same(grads(loss), wanted.grads)
del loss
check_usable()
say("parent")
"""
    )
    finish(process, "parent")


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at the process's open files")
def test_a_process_killed_with_writes_under_way_leaves_no_file(start, folder):
    process = start(
        """
gate = Gate("pwritev")
loss = forward()
assert gate.inside.wait(120)
say("writing")
gate.open.wait()
"""
    )
    assert process.stdout.readline() == "writing\n"
    opened = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert any(path.startswith(f"{folder.resolve()}/") and path.endswith("(deleted)") for path in opened)
    assert list(folder.iterdir()) == []
    process.send_signal(signal.SIGKILL)
    assert process.wait(120) == -signal.SIGKILL
    assert list(folder.iterdir()) == []


SLOW = """
pwritev, preadv = os.pwritev, os.preadv

def slow(*args):
    threading.Event().wait(0.02)
    return pwritev(*args)

os.pwritev = slow
"""

EXITS = {
    "with a live graph": "loss = forward()",
    "with a live graph in a cycle": "loss = forward()\nmodel.loss = [loss]\nmodel.loss.append(model.loss)",
    "inside of the context": "store.__enter__()\nloss = model(*batch).sum()",
    "in the middle of a second forward": "kept = forward()\nstore.__enter__()\nloss = model[:3](*batch)",
    "with a failed disk": (
        "def fail(*args): raise OSError(5, 'Input/output error')\n"
        "os.pwritev = fail\nwarnings.simplefilter('ignore')\nloss = forward()"
    ),
    "after close": "loss = forward()\nstore.close()",
    "without the store": "loss = forward()\ndel store",
}


@pytest.mark.parametrize(
    ("name", "window"),
    [*((name, "64MiB") for name in EXITS), ("with a live graph", "1MiB"), ("inside of the context", "1MiB")],
)
def test_the_interpreter_exits(start, name, window):
    finish(start(f"{SLOW}\n{EXITS[name]}\nsay('leaving')", window), "leaving")


LATE = """
def late():
    try:
        check_same(grads(loss), wanted.grads)
    except StateError as error:
        assert "interpreter shutdown" in str(error), error
    say("told")

from actstore.errors import StateError
loss = forward()
"""


@pytest.mark.parametrize("way", ["import atexit; atexit.register(late)", "threading.Thread(target=late).start()"])
def test_a_backward_that_outlives_the_main_thread(start, way):
    """Gradients come from the disk as long as Python gives threads; after that, an error says so."""
    finish(start(f"{SLOW}\n{LATE}\n{way}\n", "1MiB"), "told")


def test_an_exit_with_another_code(start):
    finish(start(f"{SLOW}\nloss = forward()\nsys.exit(3)"), "", 3)
