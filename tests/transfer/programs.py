"""Random programs for the store on the simulated accelerator, and what must be true of each.

A program is some lanes: forward passes whose payloads are put, got back and dropped. Its lanes take turns on one
thread, or run on threads of their own; each computes on a stream of its own, and may change to another for backward.
The seed chooses the program and the schedule: which copies, jobs and threads run at each moment.

Of every program `check` demands that

* each payload comes back with its bytes, as often as it is asked for, though its source is overwritten at once;
* no two conflicting accesses to memory go without an event that orders them, and none goes to memory that was returned;
* no more than a window of bytes is on its way to a tier;
* the host waits for nothing but the disk and, in `close`, the end of copies;
* nothing is left: no slot, buffer, pinned memory, device memory, or byte in the books.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch

from actstore import Disk, Host, Window
from actstore.base.spec import Site, Spec
from actstore.codecs import AtMost, Codec, Raw
from actstore.store.payload import ForwardPass, Payload
from actstore.store.store import Store
from actstore.store.tierset import StoreOptions
from actstore.tiers import arena, parts
from actstore.transfer import engine, readback
from tests.contracts.clean import traffic
from tests.simulation import SimDevice, Stream, install, simulation

CPU = torch.device("cpu")
PAGE = 4096
LADDERS = (("host",),) * 8 + (("host", "device"), ("disk",), ("host", "disk"))


def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation, with sizes so small that little memory meets windows, segments and parcels in many ways."""
    install(monkeypatch)
    monkeypatch.setattr(arena, "SEGMENT_NBYTES", 4 * PAGE)
    monkeypatch.setattr(engine, "SMALL_NBYTES", 2048)
    monkeypatch.setattr(engine, "PARCEL_NBYTES", PAGE)
    monkeypatch.setattr(engine, "ACCELERATOR_FACTOR", 1)
    monkeypatch.setattr(readback, "RESULTS_PER_PAGE", 4)
    monkeypatch.setattr(parts.Ring, "chunk_nbytes", 2 * PAGE)


@dataclass(frozen=True)
class Counted(Codec):
    """Bytes up to the last one that is not zero, behind their length."""

    name = "counted"
    lossless = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype is torch.uint8

    def size(self, spec: Spec) -> AtMost:
        return AtMost(16 + spec.numel)

    def encode(self, src: torch.Tensor, out: torch.Tensor, key: int = 0) -> int:
        kept = int(src.count_nonzero())
        out[:8].view(torch.int64)[0] = 16 + kept
        out[16 : 16 + kept] = src[:kept]
        return 16 + src.numel()

    def decode(self, buf: torch.Tensor, out: torch.Tensor, key: int = 0) -> None:
        kept = int(buf[:8].view(torch.int64)[0]) - 16
        out.zero_()
        if 0 <= kept <= out.numel():  # else what was decoded is not the payload: the bytes will be wrong
            out[:kept] = buf[16 : 16 + kept]


class Planted(Exception):
    """What a codec raises here."""


class Failing(Raw):
    """Fails when it encodes."""

    def encode(self, src: torch.Tensor, out: torch.Tensor, key: int = 0) -> int:
        raise Planted

    bind = Codec.bind


RAW, COUNTED, FAILING = Raw(), Counted(), Failing()


class Owned(Payload):
    """An entry of a site of its own."""

    __slots__ = ()

    def __init__(self, store: Store, site: int) -> None:
        super().__init__(store.ledger.account(Site("m", site)))


@dataclass(frozen=True)
class Options:
    """What a program is made of; chosen by chance unless given."""

    ladder: tuple[str, ...] | None = None
    lanes: int | None = None
    threads: bool | None = None
    steps: int | None = None
    variable: bool | None = None
    unread: float = 0.1  # of the payloads are never asked for
    store: dict[str, Any] | None = None


ANY = Options()


class Program:
    """What a seed stands for, on a device."""

    def __init__(self, device: SimDevice, seed: int, folder: Any, options: Options) -> None:
        self.device = device
        self.random = random = Random(seed)
        self.ladder = options.ladder or random.choice(LADDERS)
        self.threads = random.random() < 0.15 if options.threads is None else options.threads
        self.steps = options.steps or random.choice((1, 1, 1, 2))
        self.lanes = options.lanes or random.choice((1, 2, 2))
        self.variable = random.random() < 0.3 if options.variable is None else options.variable
        self.waits = "disk" in self.ladder  # the host may wait for workers
        self.unread = options.unread
        self.marks = 0
        self.engines: list[engine.Engine] = []
        device.refuse_pinned = random.random() < 0.05
        settings = {
            "host": random.choice((None, None, None, 8 * PAGE, 3 * PAGE)),
            "disk": random.choice((None, None, 5 * PAGE)),
            "window": random.choice((PAGE, 2 * PAGE, 4 * PAGE, 16 * PAGE)),
            "when_full": random.choice(("wait", "wait", "keep", "spill")),
            "verify": random.random() < 0.15,
        } | (options.store or {})
        tiers = {"host": Host(settings["host"]), "disk": Disk(folder, settings["disk"])}
        window = Window(settings["window"], settings["when_full"])
        self.store = Store(StoreOptions(tiers, window, verify=settings["verify"]))
        if Random(f"{seed}: copies without times").random() < 0.3:  # as in most steps of a long run
            self.store._times = lambda: False

    def run(self) -> None:
        device, random = self.device, self.random
        streams = [device.current(), device.compute_stream()]
        for step in range(self.steps):
            with self.may_wait():
                self.store.start()
            seeds = [random.random() for _ in range(self.lanes)]
            lanes = [Lane(self, seed, i, streams[random.random() < 0.5]) for i, seed in enumerate(seeds)]
            if self.threads:
                futures = [
                    device.scheduler.spawn(lane.all, name=f"thread {i}", stream=lane.stream)
                    for i, lane in enumerate(lanes)
                ]
                for future in futures:
                    future.result()
            else:
                turns = [lane.turns() for lane in lanes]
                while turns:
                    turn = random.choice(turns)
                    if next(turn, self) is self:
                        turns.remove(turn)
            if step == self.steps - 1 and random.random() < 0.2:
                self.close()
            del lanes
        self.close()
        self.check_clean()

    @contextmanager
    def may_wait(self) -> Iterator[None]:
        here = self.device.scheduler.here
        before, here.may_wait = here.may_wait, self.waits
        try:
            yield
        finally:
            here.may_wait = before

    def close(self) -> None:
        self.engines = [place.engine for place in self.store._places.values()] or self.engines
        self.waits = True
        with self.may_wait():
            self.store.close()

    def check_windows(self) -> None:
        others = self.lanes - 1 if self.threads else 0  # what they encode at this moment, nobody can wait for
        for place in self.store._places.values():
            for tier, window in place.engine._traffic.quota.windows.items():
                waiting = [parcel for parcel in place.engine._traffic.open.values() if parcel.tier is tier]
                sizes = sorted(parcel.capacity for parcel in (*waiting, *window.flights))
                sizes = sizes[: len(sizes) - others]
                most = place.engine._traffic.quota.window_nbytes
                assert len(sizes) <= 1 or sum(sizes) <= most, f"{sizes} bytes on their way through a window of {most}"

    def check_clean(self) -> None:
        for each in self.engines:
            assert traffic(each) == {}, f"{traffic(each)} left"
        for account in self.store.ledger.accounts():
            assert (account.held, account.away) == (0, 0), (
                f"{account.site}: {account.held} bytes held, {account.away} away"
            )
        assert [reserved for reserved, _ in self.store.ledger.media.values() if reserved] == []


class Lane:
    """A forward pass and its backward."""

    def __init__(self, program: Program, seed: float, number: int, stream: Stream) -> None:
        self.program = program
        self.random = Random(seed)
        self.stream = stream
        self.live: list[tuple[Owned, torch.dtype, int, int, int]] = []

    def all(self) -> None:
        for _ in self.turns():
            pass

    def turns(self) -> Iterator[None]:
        """One operation of the program at a time."""
        random, device, store = self.random, self.program.device, self.program.store
        count = random.choice((1, 2, 3, 4, 6))
        with self.on(self.stream):
            forward = store.begin(CPU)
        for i in range(count):
            with self.on(self.stream):
                self.put(forward, i)
            if self.live and random.random() < 0.1:
                self.drop()
            yield
            if random.random() < 0.1:
                with self.on(self.stream):
                    store.poll()
        with self.on(self.stream):
            store.end(forward)
            ended = device.record(self.stream)
        yield
        stream = self.stream
        if random.random() < 0.2:
            stream = random.choice((device.scheduler.main_stream, device.compute_stream()))
            device.enter()
            ended.wait_on(stream)  # as autograd does
        order = random.choice(("last first", "last first", "first first", "any"))
        while self.live:
            at = {"last first": -1, "first first": 0, "any": random.randrange(len(self.live))}[order]
            if random.random() >= self.program.unread:
                with self.on(stream):
                    self.get(self.live[at])
                yield
            if random.random() < 0.9:
                self.drop(at)
        yield

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        with self.program.device.on(stream), self.program.may_wait():
            yield

    def put(self, forward: ForwardPass, i: int) -> None:
        program, random, device = self.program, self.random, self.program.device
        numel = random.choice((1, 100, 700, 1500, 3000, PAGE, 5000, 3 * PAGE))
        codec: Codec = RAW
        if program.variable and random.random() < 0.7:
            codec = COUNTED
        elif random.random() < 0.05:
            codec = FAILING
        kept = random.randrange(numel + 1) if codec is COUNTED else numel
        program.marks = value = program.marks % 250 + 1
        entry = Owned(program.store, i)
        src = contents(numel, kept, value)
        device.compute(writes=[src], what="forward")
        try:
            route = program.store.route(entry.account, src, codec, program.ladder)
            found = program.store.put(entry, src, route, numel, forward)
        except Planted:
            found = None
        program.check_windows()
        device.compute(writes=[src], what="the user's next operation")
        src.fill_(0xEE)
        if found:
            self.live.append((entry, numel, kept, value))

    def get(self, what: Any) -> None:
        entry, numel, kept, value = what
        device = self.program.device
        for _ in range(self.random.choice((1, 1, 1, 2))):
            out = torch.empty(numel, dtype=torch.uint8)
            self.program.store.get(entry, out)
            device.compute(reads=[out], what="backward")
            assert torch.equal(out, contents(numel, kept, value)), "wrong bytes came back"

    def drop(self, at: int = -1) -> None:
        del self.live[at]


_RAMP = (torch.arange(4 * PAGE) % 251 + 1).to(torch.uint8)


def contents(numel: int, kept: int, value: int) -> torch.Tensor:
    """Bytes that no other payload near by has, none of them zero; behind the `kept` ones there are zeros."""
    tensor = _RAMP[value : value + numel].clone()
    tensor[kept:] = 0
    return tensor


def check(seed: int, folder: Any, options: Options = ANY) -> None:
    """Run the program of a seed.

    Raises
    ------
    AssertionError : something that must be true of it was not
    """
    with simulation(seed) as device:
        Program(device, seed, folder, options).run()
        device.finish()
        if any(device.held_nbytes):
            gc.collect()  # tracebacks of reads that came too late
        held = device.held_nbytes
        assert held == (0, 0), f"{held[0]} bytes of device memory and {held[1]} of pinned memory are left"
