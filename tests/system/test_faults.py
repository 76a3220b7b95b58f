"""What goes wrong around a training step, and that each time there is a clear error or a documented fallback: no wrong
gradient, no hang, nothing left behind, and a store that can be used afterwards."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from torch import Tensor, nn

from actstore import ActivationStore, Disk, Host, Window
from actstore.devices import Cpu
from actstore.errors import CapacityError, ConfigError, PayloadError, StateError, TransferError
from actstore.tiers.parts import Ring
from tests.autograd.checks import Step, check_drained, check_same, train_step
from tests.tiers.conftest import disk_folder

__all__ = ["disk_folder"]

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64
ROWS = 4096  # activations of 1 MiB: each travels by itself
RAW = "raw @ disk"
OPEN_FILES = Path("/proc/self/fd")


class Point(nn.Module):
    """Runs `action` in forward, and `in_backward` when the gradient passes; returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.action: Callable[[], None] | None = None
        self.in_backward: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.action is not None:
            self.action()
        act = self.in_backward
        if act is not None:
            x.register_hook(lambda _: act())
        return x


def build(depth: int = 3) -> tuple[nn.Sequential, tuple[Tensor]]:
    torch.manual_seed(0)
    half = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*half, Point(), nn.Linear(WIDTH, WIDTH)), (torch.randn(ROWS, WIDTH),)


def point_of(model: nn.Sequential) -> Point:
    return next(layer for layer in model if isinstance(layer, Point))


@pytest.fixture
def make(disk_folder: Path) -> Iterator[Callable[..., ActivationStore]]:
    """Stores that must be empty, and usable, at the end."""
    made = []

    def make(model, policy=RAW, tiers=(), disk_budget=None, **options):
        tiers = [Disk(disk_folder, disk_budget), *tiers]
        made.append((model, ActivationStore(model, policy, min_bytes=0, tiers=tiers, **options)))
        return made[-1][1]

    before = set(threading.enumerate())
    yield make
    gc.collect()  # exceptions, with what their tracebacks hold
    for model, store in made:
        with suppress(StateError):  # closed by the test
            batch = (torch.randn(8, WIDTH),)
            check_same(train_step(model, batch, store), train_step(model, batch))
            check_drained(store)
        store.close()
    assert not set(threading.enumerate()) - before


def failing(call: Callable, code: int, after: int = 0, only: int | None = None) -> Callable:
    """A system call that fails from the call number `after` on, `only` so many times."""
    count = iter(range(10**9))

    def fail(*args):
        number = next(count) - after
        if number >= 0 and (only is None or number < only):
            raise OSError(code, os.strerror(code))
        return call(*args)

    return fail


class Gate:
    """A system call that waits inside until it is let through."""

    def __init__(self, call: Callable) -> None:
        self.call = call
        self.inside = threading.Event()
        self.open = threading.Event()

    def __call__(self, *args):
        self.inside.set()
        assert self.open.wait(120)
        return self.call(*args)


@contextmanager
def gated(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Gate]:
    gate = Gate(getattr(os, name))
    with monkeypatch.context() as patch:
        patch.setattr(os, name, gate)
        try:
            yield gate
        finally:
            gate.open.set()


def notes(store: ActivationStore) -> set[str]:
    return {site.note for site in store.report().sites if site.note}


def await_writes(store: ActivationStore) -> None:
    """Until every write has ended, well or badly."""
    engines = [place.engine for place in store._store._places.values()]
    for parcel in [
        parcel for engine in engines for window in engine._traffic.quota.windows.values() for parcel in window.flights
    ]:
        with suppress(TransferError):
            parcel.motion.result()


def train_several(model: nn.Sequential, batch: tuple[Tensor], store: ActivationStore, wanted: Step) -> None:
    """Some steps, which are right or raise, until the store has heard of all that happened to its writes."""
    for _ in range(3):
        check_same(train_step(model, batch, store), wanted)
    await_writes(store)
    store.report()


# -- no room ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk(make, monkeypatch, after):
    model, batch = build()
    wanted = train_step(model, batch)
    monkeypatch.setattr("actstore.tiers.file.GROWTH_NBYTES", (1, 1))
    monkeypatch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, errno.ENOSPC, after))
    store = make(model)
    check_same(train_step(model, batch, store), wanted)
    assert "kept: no room in disk" in notes(store)
    strict = make(model, strict=True)
    with pytest.raises(CapacityError, match=r"while saving .*: no room for .* in disk"):
        train_step(model, batch, strict)
    monkeypatch.undo()
    check_same(train_step(model, batch, strict), wanted)


def test_a_full_disk_at_the_end_of_a_ladder(make, monkeypatch):
    model, batch = build()
    wanted = train_step(model, batch)
    monkeypatch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, errno.ENOSPC))
    store = make(model, "raw @ host > disk", tiers=[Host("2MiB")])
    check_same(train_step(model, batch, store), wanted)
    assert "kept: no room in host > disk" in notes(store)


@pytest.mark.parametrize("policy", ["raw @ disk", "raw @ host", "raw @ host > disk"])
@pytest.mark.parametrize("budget", [0, 1, 3 * 2**20])
def test_budgets_of_nothing_and_smaller_than_the_tensors(make, policy, budget):
    model, batch = build()
    wanted = train_step(model, batch)
    store = make(model, policy, tiers=[Host(budget)], disk_budget=budget)
    for _ in range(3):
        check_same(train_step(model, batch, store), wanted)
    assert f"kept: no room in {policy.removeprefix('raw @ ')}" in notes(store)


@pytest.mark.parametrize("when_full", ["wait", "keep", "spill"])
@pytest.mark.parametrize("policy", ["raw @ disk", "zmask(expack) @ host > disk"])
def test_a_window_smaller_than_a_tensor(make, policy, when_full):
    model, batch = build()
    wanted = train_step(model, batch)
    store = make(model, policy, tiers=[Window(1, when_full=when_full)])
    for _ in range(3):
        check_same(train_step(model, batch, store), wanted)


def test_pinned_memory_refused(make, monkeypatch):
    monkeypatch.setattr(Cpu, "pinned", lambda self, nbytes: None)
    model, batch = build()
    check_same(train_step(model, batch, make(model)), train_step(model, batch))


# -- the disk fails ---------------------------------------------------------------------------------------------------


def test_a_folder_that_vanishes(make, disk_folder):
    model, batch = build()
    wanted = train_step(model, batch)
    store = make(model)
    with store:
        loss = model(*batch).square().mean()
    shutil.rmtree(disk_folder)
    model.zero_grad()
    loss.backward()
    check_same([parameter.grad for parameter in model.parameters()], list(wanted.grads.values()))
    check_same(train_step(model, batch, store), wanted)  # the file needs no name
    with pytest.raises(ConfigError, match=r"Disk\(path=.*\) cannot hold the disk tier: No such file or directory"):
        make(model)
    disk_folder.mkdir()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("window", [None, "1MiB"])
@pytest.mark.parametrize("after", [0, 3])
def test_writes_that_fail_in_the_middle_of_training(make, monkeypatch, code, window, after):
    model, batch = build()
    wanted = train_step(model, batch)
    store = make(model, tiers=[Window(window)])
    check_same(train_step(model, batch, store), wanted)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(os.pwritev, code, after))
        with pytest.warns(RuntimeWarning, match="could not leave the device") as told:
            train_several(model, batch, store, wanted)
        assert len(told) == 1
        assert os.strerror(code) in str(told[0].message)
        assert "Disk(path)" in str(told[0].message)
        with store:
            loss = model(*batch).square().mean()
        await_writes(store)
        assert "kept: disk failed" in notes(store)
        assert store.report().live_bytes > ROWS * WIDTH * 4  # they stay, and are accounted for
        loss.backward()
    check_same(train_step(model, batch, store), wanted)


def test_a_part_that_fails_while_another_is_written(make, monkeypatch):
    """The payload stays where it is: a tier that has half of it has nothing."""
    model, batch = build()
    wanted = train_step(model, batch)
    nbytes = ROWS * WIDTH * 4
    monkeypatch.setattr(Ring, "chunk_nbytes", nbytes // 2)
    store = make(model, tiers=[Window(nbytes)])
    check_same(train_step(model, batch, store), wanted)
    failed, write = threading.Event(), os.pwritev

    def fail(*args):
        if args[2] % nbytes == 0 and not failed.is_set():  # the first part, for which whoever waits does so first
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        assert failed.wait(20)
        sleep(0.1)  # whoever believes that the first part is all goes on by now
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        with pytest.warns(RuntimeWarning, match="could not leave the device"):
            train_several(model, batch, store, wanted)


@pytest.mark.parametrize("window", [None, "1MiB"])
def test_a_failed_write_where_warnings_are_errors(make, monkeypatch, window):
    """The warning is then an exception in the middle of forward or of backward: nothing is lost by it."""
    model, batch = build()
    wanted = train_step(model, batch)
    store = make(model, tiers=[Window(window)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing(os.pwritev, errno.EIO))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="could not leave the device"):
                train_several(model, batch, store, wanted)
        check_same(train_step(model, batch, store), wanted)
    gc.collect()
    check_drained(store)


def test_a_backward_that_is_the_first_to_hear_of_a_failed_write(make, monkeypatch):
    """And is broken off by it, where warnings are errors: it can be run again."""
    model, batch = build()
    wanted = train_step(model, batch)
    store = make(model)
    model.zero_grad()
    with gated(monkeypatch, "pwritev") as gate:
        gate.call = failing(gate.call, errno.EIO)
        with store:
            loss = model(*batch).square().mean()
        gate.open.set()
        await_writes(store)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="could not leave the device"):
                loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    check_same({name: p.grad for name, p in model.named_parameters()}, wanted.grads)


def damaged(kind: str) -> Callable:
    """A `preadv` that fails, ends early, or brings one byte that was not written."""
    read = os.preadv

    def altered(fd, views, at):
        count = read(fd, views, at)
        views[0][0] ^= 1
        return count

    return {"refused": failing(read, errno.EIO), "short": lambda *_: 0, "altered": altered}[kind]


FAULTS = {
    "refused": (TransferError, "reading .* failed .*Input/output error"),
    "short": (PayloadError, "file ends after 0 of"),
    "altered": (PayloadError, "another checksum"),
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("policy", ["raw @ disk", "zmask(expack) @ disk"])
def test_bytes_that_cannot_be_read(make, monkeypatch, kind, policy):
    """Backward says which site, which tensor and which tier; a graph that was retained can be run again."""
    model, batch = build()
    wanted = train_step(model, batch)
    store = make(model, policy, tiers=[Window("1MiB")])  # the first payloads have left before backward
    model.zero_grad()
    with store:
        loss = model(*batch).square().mean()
    error, text = FAULTS[kind]
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", damaged(kind))
        for _ in range(3):
            with pytest.raises(error, match=text) as raised:
                loss.backward(retain_graph=True)
            assert "while decoding" in str(raised.value)
            assert f"(float32 {ROWS}x{WIDTH} " in str(raised.value)
            assert policy in str(raised.value)
    model.zero_grad()
    loss.backward()
    check_same({name: p.grad for name, p in model.named_parameters()}, wanted.grads)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_that_passes_before_anybody_asks(make, monkeypatch, kind):
    """What was fetched ahead in vain is fetched again when it is asked for."""
    model, batch = build()
    wanted = train_step(model, batch)
    store = make(model, tiers=[Window("1MiB")])
    train_step(model, batch, store)
    point = point_of(model)
    with monkeypatch.context() as patch:
        point.in_backward = lambda: patch.setattr(os, "preadv", damaged(kind))
        with suppress(TransferError, PayloadError):
            train_step(model, batch, store)
    point.in_backward = None
    gc.collect()
    check_drained(store)
    check_same(train_step(model, batch, store), wanted)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
def test_a_worker_that_dies_in_a_write(make, monkeypatch, error):
    model, batch = build()
    wanted = train_step(model, batch)
    store = make(model)

    def die(*_):
        raise error("died")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", die)
        with pytest.warns(RuntimeWarning, match="could not leave the device: died"):
            train_several(model, batch, store, wanted)
    check_same(train_step(model, batch, store), wanted)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
def test_a_worker_that_dies_in_a_read(make, monkeypatch, error):
    model, batch = build()
    wanted = train_step(model, batch)
    store = make(model, tiers=[Window("1MiB")])

    def die(*_):
        raise error("died")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", die)
        with pytest.raises(TransferError, match=r"while decoding .*died"):
            train_step(model, batch, store)
    check_same(train_step(model, batch, store), wanted)


# -- interrupts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("policy", ["raw @ disk", "zmask(expack) @ disk", "raw @ host > disk"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle(make, policy, error, where):
    model, batch = build()
    wanted = train_step(model, batch)
    store = make(model, policy, tiers=[Host("2MiB")])
    point = point_of(model)

    def throw():
        raise error("now")

    for inside in (False, True):
        setattr(point, "action" if where == "forward" else "in_backward", throw)
        with pytest.raises(error, match="now"):
            train_step(model, batch, store, inside=inside)
        point.action = point.in_backward = None
        gc.collect()
        check_drained(store)
        check_same(train_step(model, batch, store), wanted)


# -- several at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["raw @ disk", "zmask(expack) @ disk", "raw @ host > disk"])
def test_another_shape_in_every_step(make, policy):
    model, _ = build()
    store = make(model, policy, tiers=[Host("2MiB"), Window("2MiB")], disk_budget="6MiB")
    for rows in torch.randint(1, ROWS, (10,), generator=torch.Generator().manual_seed(1)).tolist():
        batch = (torch.randn(rows, WIDTH),)
        check_same(train_step(model, batch, store), train_step(model, batch))


def test_two_models_at_once(make):
    (one, batch), (two, _) = build(), build(2)
    wanted = train_step(one, batch).grads, train_step(two, batch).grads
    first, second = make(one), make(two)
    for order in (1, -1):
        one.zero_grad()
        two.zero_grad()
        losses = []
        for _ in range(2):  # the first time to learn
            with first:
                a = one(*batch).square().mean()
                with second:
                    b = two(*batch).square().mean()
            losses = [a, b][::order]
            for loss in losses[:-1] if order == 1 else losses[1:]:
                torch.autograd.grad(loss, list((one if loss is a else two).parameters()), retain_graph=True)
        for loss in losses:
            loss.backward()
        check_same({name: p.grad for name, p in one.named_parameters()}, wanted[0])
        check_same({name: p.grad for name, p in two.named_parameters()}, wanted[1])


@pytest.mark.parametrize("fails", [False, True])
def test_threads_on_one_store(make, monkeypatch, fails):
    """Also when the disk fails under them: each thread's gradients are right, or its backward says what it lacks."""
    model, _ = build()
    batches = [torch.randn(ROWS // 2, WIDTH) for _ in range(3)]
    parameters = list(model.parameters())
    store = make(model, tiers=[Window("1MiB")])

    def grads(batch):
        return torch.autograd.grad(model(batch).square().mean(), parameters)

    wanted = [grads(batch) for batch in batches]
    if fails:
        monkeypatch.setattr(os, "pwritev", failing(os.pwritev, errno.EIO, 5))

    def work(number):
        for _ in range(5):
            with store:
                loss = model(batches[number]).square().mean()
            check_same(torch.autograd.grad(loss, parameters), wanted[number])

    with warnings.catch_warnings(), ThreadPoolExecutor(3) as pool:
        warnings.simplefilter("ignore", RuntimeWarning)
        for done in [pool.submit(work, number) for number in range(3)]:
            done.result(120)
        store.report()
    monkeypatch.undo()


def test_a_read_that_fails_under_several_threads(make, monkeypatch):
    """All who wait for it are told, and who comes later gets the bytes."""
    model, batch = build()
    parameters = list(model.parameters())
    store = make(model, tiers=[Window("1MiB")])
    with store:
        loss = model(*batch).square().mean()
    wanted = torch.autograd.grad(loss, parameters, retain_graph=True)

    def work(_):
        return torch.autograd.grad(loss, parameters, retain_graph=True)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(10):
            with monkeypatch.context() as patch, gated(patch, "preadv") as gate:
                gate.call = failing(gate.call, errno.EIO)
                jobs = [pool.submit(work, number) for number in range(3)]
                assert gate.inside.wait(120)
                gate.open.set()
                for job in jobs:
                    assert isinstance(job.exception(60), TransferError)
            for found in pool.map(work, range(3)):
                check_same(found, wanted)


def test_evaluation_inside_the_context(make):
    model, batch = build()
    wanted = train_step(model, batch)
    store = make(model)
    for mode in (torch.no_grad, torch.inference_mode):
        model.zero_grad()
        with store:
            with mode():
                model(*batch)
            loss = model(*batch).square().mean()
            with mode():
                model(*batch)
        loss.backward()
        check_same({name: p.grad for name, p in model.named_parameters()}, wanted.grads)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_close_with_writes_under_way(make, monkeypatch):
    model, batch = build()
    store = make(model)
    with gated(monkeypatch, "pwritev") as gate:
        with store:
            loss = model(*batch).square().mean()
        assert gate.inside.wait(120)
        closing = threading.Thread(target=store.close)
        closing.start()
        gate.open.set()
        closing.join(120)
        assert not closing.is_alive()
    with pytest.raises(StateError, match="closed before backward"):
        loss.backward()
    store.close()


def test_close_while_another_thread_waits_for_the_disk(make, monkeypatch):
    model, batch = build()
    store = make(model, tiers=[Window("1MiB")])
    with store:
        loss = model(*batch).square().mean()
    with gated(monkeypatch, "preadv") as gate, ThreadPoolExecutor(2) as pool:
        backward = pool.submit(loss.backward)
        assert gate.inside.wait(120)
        closing = pool.submit(store.close)
        gate.open.set()
        closing.result(60)
        assert isinstance(backward.exception(60), StateError | None)  # it came before, or is told
    store.close()


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="looks at the process's open files")
@pytest.mark.parametrize("backward", [True, False])
def test_a_store_that_is_forgotten_with_writes_under_way(disk_folder, monkeypatch, backward):
    """The graph keeps what it needs; with it go the threads and the file."""
    model, batch = build()
    wanted = train_step(model, batch)
    before = set(threading.enumerate())
    with gated(monkeypatch, "pwritev") as gate:
        store = ActivationStore(model, RAW, min_bytes=0, tiers=[Disk(disk_folder)])
        with store:
            loss = model(*batch).square().mean()
        assert gate.inside.wait(120)
        assert set(threading.enumerate()) - before
        del store
        gc.collect()
        assert files_in(disk_folder)
        if backward:
            gate.open.set()
            model.zero_grad()
            loss.backward()
            check_same({name: p.grad for name, p in model.named_parameters()}, wanted.grads)
        del loss
        gc.collect()
    end = monotonic() + 60
    while (left := set(threading.enumerate()) - before) and monotonic() < end:  # writers, and readers of the backward
        gc.collect()  # again: what a worker held until its write was over, or while it was collecting itself
        sleep(0.01)
    assert not left
    assert files_in(disk_folder) == []


def files_in(folder: Path) -> list[str]:
    """What this process has open there, with a name or without."""
    found = []
    for link in OPEN_FILES.iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(os.readlink(link))
    return [path for path in found if path.startswith(f"{folder.resolve()}/")]
