"""An engine on a tier whose copies end when the test says so."""

import torch

from actstore.base.ledger import Ledger
from actstore.base.spec import Site
from actstore.base.ticket import Ticket
from actstore.devices import Cpu
from actstore.tiers import Slot, Tier
from actstore.transfer.engine import Engine

KIB, MIB = 2**10, 2**20


class Copy(Ticket):
    """Runs when `end` is called, or when somebody waits."""

    def __init__(self, dst, src, tier):
        self.dst, self.src, self.tier = dst, src, tier
        self.done, self.error = False, None

    def end(self, error=None):
        if not self.done:
            self.done, self.error = True, error
            if error is None:
                self.dst[: self.src.numel()].copy_(self.src)

    def ready(self):
        return self.done

    def wait_on(self, stream):
        self.tier.waits += not self.done
        self.result()

    def result(self):
        self.end()
        if self.error is not None:
            raise self.error

    def span(self):
        return (0, 1000) if self.done and self.error is None else None


class Manual(Tier):
    name = "manual"

    def __init__(self, capacity=2**40):
        self.left = capacity
        self.copies = []
        self.waits = 0
        self.freed = []
        self.refuses = None  # the next write or read raises this

    def reserve(self, nbytes):
        if nbytes > self.left:
            return None
        self.left -= nbytes
        return Slot(nbytes, torch.full((nbytes,), 0xEE, dtype=torch.uint8))

    def _start(self, dst, src):
        if self.refuses is not None:
            raise self.refuses
        self.copies.append(Copy(dst, src, self))
        return self.copies[-1]

    def write(self, slot, src, after=()):
        slot.written = self._start(slot.buffer, src)
        return slot.written

    def read(self, slot, dst, after=()):
        assert slot.written.ready(), "read before it was written"
        return self._start(dst, slot.buffer[: dst.numel()])

    def free(self, slot):
        self.left += slot.nbytes
        self.freed.append(slot)

    def close(self):
        pass


class KeepingCpu(Cpu):
    """A CPU whose freed memory costs new pages, as on one without actstore's allocator."""

    def recycles(self, nbytes):
        return False


class Bench:
    def __init__(self, **options):
        self.ledger = Ledger()
        self.engine = Engine(KeepingCpu(torch.device("cpu")), self.ledger, **options)
        self.tier = Manual()
        self.run = self.engine.begin()
        self.account = self.ledger.account(Site("m", 0))

    def put(self, nbytes, value=1, run=None):
        berth = self.engine.board(run or self.run, self.tier, nbytes, self.account)
        if berth is not None:
            berth.memory.fill_(value)
            self.engine.depart(berth)
        return berth

    def get(self, berth):
        memory = self.engine.arrive(berth).clone()
        self.engine.leave(berth)
        assert memory.numel() == berth.nbytes
        assert memory.min() == memory.max()
        return int(memory[0])

    def drop(self, *berths):
        for berth in berths:
            self.engine.drop(berth)
        self.engine.poll()

    @property
    def figures(self):
        self.ledger.accounts()
        return self.account.held, self.account.away

    @property
    def outcomes(self):
        self.engine.poll()
        return self.account.hits, self.account.late, self.account.misses
