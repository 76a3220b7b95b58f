"""Many steps of every kind that go wrong, and what the process holds afterwards: `python -m tests.system.soak`.

Each step draws random shapes and one of the kinds of `KINDS`: plain ones, exceptions in the middle of forward and of
backward, graphs that nobody runs, stores inside stores, threads. After 100 steps and after the last one everything is
dropped, and what is still there is counted. Prints a line for each promise; exits with 1 when one is broken.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from time import perf_counter, sleep

import torch
from torch import Tensor, nn

from actstore import ActivationStore, Disk, Host, Window, encode
from actstore.base.layout import layout_of
from actstore.devices import cpu_memory

POLICIES = ("raw @ disk", "int8 @ host > disk", "zmask(expack) @ disk")
LOSSY = 1
WARM = 100  # steps after which nothing may grow: caches are filled, kernels compiled, the allocator is at its level,
# and each kind of step has been with each store, which learns from every one of them

# What the process may gain between step 100 and the last. Workers that start late and the disorder of the heap make
# 1 to 3 MiB. 4 KiB, the least that a payload or a handle with its tensor can keep, in each of 1,900 steps is 7 MiB.
TOLERANCE_NBYTES = 4 * 2**20
TOLERANCE_OBJECTS = 50  # of actstore's own and tensors: an object left behind by one step in 38 shows


M_ARENA_MAX = -8  # of malloc.h


class Planned(Exception):
    """The exception that a step throws in the middle of forward or of backward."""


class Breaks(nn.Module):
    """Passes its input on, unless this forward or this backward is to break."""

    def __init__(self) -> None:
        super().__init__()
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        when, self.when = self.when, ""
        if when == "forward":
            raise Planned
        if when == "backward":
            x.register_hook(_throw)
        return x


def _throw(_: Tensor) -> None:
    raise Planned


class Model(nn.Module):
    """Two outputs, an operator of each kind that saves something, and a place to break."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(0.1))
        self.breaks = Breaks()
        self.outer = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 16))
        self.other = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.breaks(self.inner(x))
        return self.outer(hidden), self.other(hidden).exp()


class Soak:
    """Two models, each with a store of every policy, which live as long as the soak."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.models = [Model(64), Model(96)]
        self.stores = [
            [
                ActivationStore(model, policy, min_bytes=0, tiers=[Host("48KiB"), Disk(folder), Window("1MiB")])
                for policy in POLICIES
            ]
            for model in self.models
        ]
        self.kinds: Counter[str] = Counter()

    def step(self) -> None:
        kind = self.random.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        which = self.random.randrange(len(self.models))
        self.take(kind, self.models[which], self.random.choice(self.stores[which]))

    def take(self, kind: str, model: Model, store: ActivationStore) -> None:
        self.kinds[kind] += 1
        KINDS[kind][1](self, model, store)

    def warm(self) -> None:
        """The first steps: of every kind with every store, and then as chance has it."""
        for kind in KINDS:
            for model, stores in zip(self.models, self.stores, strict=True):
                for store in stores:
                    self.take(kind, model, store)
        while self.kinds.total() < WARM:
            self.step()

    def batch(self) -> Tensor:
        return torch.randn(self.random.randint(1, 8), self.random.randint(1, 48), 16)

    def rest(self) -> None:
        """Two steps of the least size with each store: pools keep what these need. Errors are sampled."""
        for model, stores in zip(self.models, self.stores, strict=True):
            for store in stores:
                store.sample_next()
                for _ in range(2):
                    with store:
                        loss = model(torch.ones(1, 16))[0].sum()
                    loss.backward()
                with store:
                    pass
            model.zero_grad()

    def close(self) -> None:
        for stores in self.stores:
            for store in stores:
                store.close()


# -- the kinds of steps -----------------------------------------------------------------------------------------------


def plain(soak: Soak, model: Model, store: ActivationStore) -> None:
    """One forward and one backward; where nothing is lost, gradients are those of a step without a store."""
    batch, found = soak.batch(), []
    exact = store not in [stores[LOSSY] for stores in soak.stores]
    for context in [store, nullcontext()][: 1 + exact]:
        model.zero_grad()
        torch.manual_seed(soak.kinds["plain"])
        with context:
            out, other = model(batch)
        (out.sum() + other.sum()).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    if exact and not all(map(torch.equal, *found)):
        raise AssertionError(f"gradients differ from those without a store: {store.policy}")


def inside(soak: Soak, model: Model, store: ActivationStore) -> None:
    """Backward inside of the context, two forwards after one another."""
    with store:
        for _ in range(2):
            model(soak.batch())[0].sum().backward()


def breaks_forward(soak: Soak, model: Model, store: ActivationStore) -> None:
    model.breaks.when = "forward"
    try:
        with store:
            model(soak.batch())
    except Planned:
        return
    raise AssertionError("the forward did not break")


def breaks_backward(soak: Soak, model: Model, store: ActivationStore) -> None:
    model.breaks.when = "backward"
    with store:
        loss = model(soak.batch())[0].sum()
    try:
        loss.backward()
    except Planned:
        return
    raise AssertionError("the backward did not break")


def unused_output(soak: Soak, model: Model, store: ActivationStore) -> None:
    with store:
        _, other = model(soak.batch())
    other.sum().backward()


def dropped(soak: Soak, model: Model, store: ActivationStore) -> None:
    with store:
        model(soak.batch())


def retained(soak: Soak, model: Model, store: ActivationStore) -> None:
    with store:
        out, other = model(soak.batch())
    loss = out.sum() + other.sum()
    loss.backward(retain_graph=True)
    if soak.random.random() < 0.5:
        loss.backward()


def two_backwards(soak: Soak, model: Model, store: ActivationStore) -> None:
    with store:
        first, second = model(soak.batch())[0].sum(), model(soak.batch())[1].sum()
    for loss in (first, second) if soak.random.random() < 0.5 else (second, first):
        loss.backward()


def evaluation(soak: Soak, model: Model, store: ActivationStore) -> None:
    with store:
        with torch.no_grad():
            model(soak.batch())
        loss = model(soak.batch())[0].sum()
        with torch.inference_mode():
            model(soak.batch())
    loss.backward()


def nested(soak: Soak, model: Model, store: ActivationStore) -> None:
    stores = soak.stores[soak.models.index(model)]
    _inner(soak, model, store, stores[stores.index(store) - 1])


def in_itself(soak: Soak, model: Model, store: ActivationStore) -> None:
    _inner(soak, model, store, store)


def _inner(soak: Soak, model: Model, store: ActivationStore, other: ActivationStore) -> None:
    with store:
        hidden = model.inner(soak.batch())
        with other:
            out = model.outer(hidden)
        loss = out.sum() + model.other(hidden).sum()
    loss.backward()


def two_models(soak: Soak, model: Model, store: ActivationStore) -> None:
    """The other model's store inside of this one."""
    which = soak.models.index(model)
    _both(soak, model, store, soak.models[1 - which], soak.stores[1 - which][soak.stores[which].index(store)])


def unknown_model(soak: Soak, model: Model, store: ActivationStore) -> None:
    """A model that the store does not know runs in its context, too."""
    _both(soak, model, store, soak.models[1 - soak.models.index(model)], nullcontext())


def _both(soak: Soak, one: Model, store: ActivationStore, two: Model, inside: AbstractContextManager[object]) -> None:
    """Both models in one graph; then the first once more, alive at the same time."""
    with store:
        loss = one(soak.batch())[0].sum()
        with inside:
            loss = loss + two(soak.batch())[1].sum()
    with store:
        later = one(soak.batch())[0].sum()
    loss.backward()
    later.backward()


def threads(soak: Soak, model: Model, store: ActivationStore) -> None:
    """Three threads on one store, one of which breaks."""
    batches = [soak.batch() for _ in range(3)]
    failed: list[BaseException] = []

    def work(batch: Tensor, breaks: bool) -> None:
        try:
            with store:
                hidden = model.inner(batch)
                if breaks:
                    return
                loss = model.outer(hidden).sum()
            torch.autograd.grad(loss, list(model.outer.parameters()))
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(batch, i == 2)) for i, batch in enumerate(batches)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]


def new_store(soak: Soak, model: Model, store: ActivationStore) -> None:
    """A store for one step, which is closed, or just forgotten, with or without its graph."""
    short = ActivationStore(model, soak.random.choice(POLICIES), min_bytes=0, tiers=[Disk(soak.folder)])
    with short:
        loss = model(soak.batch())[0].sum()
    ways = soak.random.randrange(3)
    if ways < 2:
        loss.backward()
    if ways > 0:
        short.close()


Kind = Callable[[Soak, Model, ActivationStore], None]
KINDS: dict[str, tuple[float, Kind]] = {
    "plain": (6, plain),
    "backward inside": (2, inside),
    "exception in forward": (2, breaks_forward),
    "exception in backward": (2, breaks_backward),
    "unused output": (2, unused_output),
    "graph dropped": (2, dropped),
    "retain_graph": (2, retained),
    "two backwards": (2, two_backwards),
    "evaluation": (1, evaluation),
    "nested stores": (1, nested),
    "a store in itself": (1, in_itself),
    "two models": (1, two_models),
    "a model of no store": (1, unknown_model),
    "threads": (0.5, threads),
    "a store for one step": (0.5, new_store),
}


# -- what the process holds -------------------------------------------------------------------------------------------


def in_memory(soak: Soak) -> dict[str, int]:
    """What is there now that all graphs are gone."""
    soak.rest()
    layout_of.cache_clear()  # of a bounded size, which so many shapes take a while to fill
    gc.collect()
    cpu_memory.trim()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "memory": resident,
        "objects": sum(issubclass(type(it), Tensor) or "actstore." in str(type(it)) for it in gc.get_objects()),
        "live bytes": sum(store.report().live_bytes for stores in soak.stores for store in stores),
    }


def thread_counts() -> Iterator[int]:
    """Threads of the system in the next half second: one that has been joined may take a moment to end."""
    for _ in range(50):
        yield len(os.listdir("/proc/self/task"))
        sleep(0.01)


def in_system(folder: Path) -> dict[str, int]:
    """What the process has of the system."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": min(thread_counts()),
        "names in the folder": len(os.listdir(folder)),
        "bytes on disk": on_disk(folder),
    }


def on_disk(folder: Path) -> int:
    """Bytes that files of this process, nameless or not, take in `folder`."""
    nbytes = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            if os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder}/"):
                nbytes += os.fstat(int(number)).st_blocks * 512
    return nbytes


def run(steps: int, folder: Path, seed: int = 0) -> list[str]:
    """Soak for a number of steps; the promises that did not hold, in words.

    Memory is compared with what it was after 100 steps; what the system lends, with what it was before the stores were
    made, once they are closed.
    """
    begin = perf_counter()
    encode(torch.zeros(1024), "int8")  # loads numba, and that scipy, whose BLAS starts threads of its own
    before = in_system(folder)
    soak = Soak(folder, seed)
    soak.warm()
    early = in_memory(soak)
    used = on_disk(folder)
    for _ in range(steps - soak.kinds.total()):
        soak.step()
    late = in_memory(soak)
    soak.close()
    closed = in_system(folder)
    print(f"{steps} steps in {perf_counter() - begin:.1f} s, with {used:,} bytes on disk: {dict(soak.kinds)}")
    bounds = {
        "memory": (early["memory"], TOLERANCE_NBYTES),
        "objects": (early["objects"], TOLERANCE_OBJECTS),
        "live bytes": (0, 0),
        **{name: (count, 0) for name, count in before.items()},
    }
    broken = [] if used else ["nothing ever went to disk"]
    for name, (wanted, tolerance) in bounds.items():
        found = {**late, **closed}[name]
        line = f"{name}: {found:,} at the end, {wanted:,} wanted, and at most {tolerance:,} more"
        print(line)
        if found > wanted + tolerance:
            broken.append(line)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # torch's own pool of threads would count as left behind
    torch.backends.mkldnn.enabled = False  # it keeps a kernel for each shape
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # else each thread has a heap of its own
    warnings.filterwarnings("error")
    warnings.filterwarnings("ignore", "the disk tier's folder", RuntimeWarning)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        broken = run(max(options.steps, 2 * WARM), Path(folder).resolve(), options.seed)
    for line in broken:
        print(f"BROKEN {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
