"""The calls of an accelerator that the engine makes for each payload: they are most of the host's time."""

from collections import Counter
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

from actstore.base.ledger import Ledger
from actstore.base.spec import Site
from actstore.base.ticket import DONE
from actstore.devices import Accelerator, Device
from actstore.tiers.host import HostTier
from actstore.transfer.engine import Engine

KIB, MIB = 2**10, 2**20


class Counted(Device):
    """An accelerator whose copies do nothing. It counts its calls."""

    torch_device, on_host = torch.device("cpu"), False

    def __init__(self):
        self.calls = Counter()

    def current(self):
        return "compute"

    def on(self, stream):
        return nullcontext()

    def stream(self):
        return object()

    def record(self, stream):
        self.calls["record"] += 1
        return DONE

    def mark(self, stream):
        return self.record(stream)

    def wait(self, stream, ticket):
        self.calls["wait"] += 1

    def empty(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, dst, src, stream, after=()):
        self.calls["copy"] += 1
        return DONE

    def pinned(self, nbytes):
        return self.empty(nbytes)

    def unpin(self, memory):
        """Do nothing: the memory is not pinned."""

    def workers(self, count, name):
        raise NotImplementedError


def boarded(engine, *args):
    berth = engine.board(*args)
    engine.depart(berth)
    return berth


@pytest.mark.parametrize(
    ("nbytes", "together"),  # payloads, and how many of them travel in one copy
    [(64 * KIB, 512), (MIB, 32), (4 * MIB, 8), (15 * MIB, 2), (16 * MIB, 1)],
)
def test_calls_of_a_payload(nbytes, together):
    device, ledger = Counted(), Ledger()
    tier, engine = HostTier(device), Engine(device, ledger)
    account = ledger.account(Site("a", 0))
    count = max(together, 1024 * MIB // nbytes)
    copies = -(-count // together)
    for step in range(3):  # from the second step on the engine knows how much a step moves
        engine.start(step)
        device.calls.clear()
        run = engine.begin()
        berths = [boarded(engine, run, tier, nbytes, account) for _ in range(count)]
        engine.flush(run)
        out = Counter(device.calls)
        while berths:
            engine.arrive(berths[-1])
            engine.leave(berths[-1])
            engine.drop(berths.pop())
        engine.poll()
        back = device.calls - out
        assert out == {"copy": copies, "record": copies} or step == 0
        assert max(back.values()) == copies or step == 0  # the record is that of the last decoding in a parcel
    engine.close()
    tier.close()


class Event:
    """A device's event. It counts itself, and is complete when the host looks after `late` other looks."""

    counts: ClassVar = Counter()
    late = 0

    def __init__(self, device, enable_timing=False):
        self.counts["created"] += 1
        self.timed, self.left = enable_timing, 0

    def record(self, stream):
        self.counts["timed" if self.timed else "recorded"] += 1
        self.left = self.late

    def query(self):
        self.left -= 1
        return self.left < 0

    def synchronize(self):
        """It is complete."""

    def elapsed_time(self, other):
        return 0.0


class Stream(nullcontext):
    def wait_event(self, event):
        Event.counts["waited"] += 1


class Eventful(Accelerator):
    """An accelerator of ordinary memory: its events are counted."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.compute = Stream()

    def current(self):
        return self.compute

    def stream(self):
        return Stream()

    def empty(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def pinned(self, nbytes):
        return self.empty(nbytes)


@pytest.fixture
def eventful(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(Event, "late", 1)
    monkeypatch.setattr(Event, "counts", Counter())
    return Eventful()


def moved(engine, tier, step, count, nbytes, *, timed):
    """Return the events of one step."""
    account = engine._traffic.ledger.account(Site("a", 0))
    engine.start(step, timed=timed)
    Event.counts.clear()
    run = engine.begin()
    berths = [boarded(engine, run, tier, nbytes, account) for _ in range(count)]
    engine.flush(run)
    while berths:
        engine.arrive(berths[-1])
        engine.leave(berths[-1])
        engine.drop(berths.pop())
    engine.poll()
    return dict(Event.counts)


def test_events_of_a_payload_come_from_a_pool(eventful):
    """With a new event for each record and all copies timed, 24 payloads created 142 and recorded 142."""
    tier, engine, count = HostTier(eventful), Engine(eventful, Ledger()), 24
    found = [moved(engine, tier, step, count, 16 * MIB, timed=step < 4) for step in range(8)]
    timed, free = found[3], found[7]
    assert timed["timed"] == timed["created"] <= 4 * count  # the other events come from the pool
    assert timed["recorded"] <= 2 * count
    assert free.keys() == {"recorded", "waited"}
    assert free["recorded"] <= 4 * count
    engine.close()
    tier.close()


def test_an_event_serves_one_ticket_at_a_time(eventful):
    stream = eventful.current()
    first, second = eventful.record(stream), eventful.record(stream)
    events = {first._event, second._event}
    assert len(events) == 2
    del first
    third = eventful.record(stream)
    assert {second._event, third._event} == events
