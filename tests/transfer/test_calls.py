"""The calls of an accelerator that the engine makes for each payload: they are most of the host's time."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch

from actstore.base.ledger import Ledger
from actstore.base.spec import Site
from actstore.base.ticket import DONE
from actstore.devices import Device
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
