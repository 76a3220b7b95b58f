"""How long compute waits for its links, in virtual time, against theory.

A step has L layers, each of which computes for C ns and saves one payload; its copy takes T ns on the link. The window
holds k payloads. Copies out run one after the other, and the payload of layer i is encoded once that of layer i - k has
left its buffer:

    encoded(i) = max(encoded(i - 1) + C, left(i - k))        left(i) = max(encoded(i), left(i - 1)) + T

If T > C the link never rests: left(i) = C + (i + 1) T, and forward ends at encoded(L - 1) = max(L C, C + (L - k) T).
So it stalls for max(0, (L - k) T - (L - 1) C).

The k payloads that are on their way when backward begins are decoded where they are, the L - k others come back one
after the other from that moment on. Their last one is there after (L - k) T, and then the first layer's backward, which
takes D like each, may begin, the last one of L. So backward stalls for max(0, (L - k) T - (L - 1) D).

Both are 0 where T <= C and T <= D.

In the first step nobody knows yet which payloads are asked for first: of those on their way, the ones that have left
before they are asked for come back as well. In k D / (D + T) payloads' time the two meet; with a small window that is
less than 5 %.
"""

import pytest
import torch

from actstore import Window
from actstore.codecs import Raw
from actstore.store.store import TIMED_STEPS, Store
from actstore.store.tierset import StoreOptions
from actstore.tiers.host import HostTier
from tests.simulation import install, simulation
from tests.transfer.programs import CPU, Owned

C = 100_000  # ns
NBYTES = 2**20  # of a payload: one that travels by itself
RAW = Raw()


class Training:
    """Steps of `layers` layers in virtual time.

    Attributes
    ----------
    stalls : for each step, ns that forward and backward were longer than their compute, and what the books say
    """

    def __init__(self, device, *, layers, window, copy_ns):
        self.device = device
        self.layers = layers
        device.links["out"].gbps = device.links["in"].gbps = NBYTES / copy_ns
        self.store = Store(StoreOptions(window=Window(window * NBYTES)))
        self.store.place(CPU).tier("host")
        self.source, self.target = (torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(2))
        self.stalls = []

    def put(self, i, forward):
        self.device.compute(C)
        entry = Owned(self.store, i)
        route = self.store.route(entry.account, self.source, RAW, ("host",))
        assert self.store.put(entry, self.source, route, NBYTES, forward)
        return entry

    def get(self, entry, ns):
        self.store.get(entry, self.target)
        self.device.compute(ns)

    @property
    def now_ns(self):
        return self.device.current().now_ns

    def end(self):
        """The host looks at the loss."""
        self.device.scheduler.host_may_wait = True
        self.device.record(self.device.current()).result()
        self.device.scheduler.host_may_wait = False
        self.store.poll()
        return sum(account.stall_ns for account in self.store.ledger.accounts())

    def step(self, backward_ns, order):
        self.store.start()
        begin, forward = self.now_ns, self.store.begin(CPU)
        entries = {i: self.put(i, forward) for i in range(self.layers)}
        self.store.end(forward)
        turn = self.now_ns
        for i in order:
            self.get(entries.pop(i), backward_ns)
        forward_ns, backward_ns = turn - begin - self.layers * C, self.now_ns - turn - self.layers * backward_ns
        self.stalls.append((forward_ns, backward_ns, self.end()))

    def outcomes(self):
        accounts = self.store.ledger.accounts()
        return tuple(sum(getattr(each, name) for each in accounts) for name in ("hits", "late", "misses"))

    def close(self):
        self.device.scheduler.host_may_wait = True
        self.store.close()


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    install(monkeypatch)


def run(steps, *, layers=40, window=4, copy_ns=2 * C, backward_ns=C, lead_ns=10 * C, order=None):
    with simulation(timed=True, lead_ns=lead_ns) as device:
        training = Training(device, layers=layers, window=window, copy_ns=copy_ns)
        for _ in range(steps):
            training.step(backward_ns, order or range(layers - 1, -1, -1))
        training.close()
    return training


@pytest.mark.parametrize("lead_ns", [10 * C, 1000 * C], ids=lambda ns: f"lead of {ns // C} layers")
@pytest.mark.parametrize("backward", [1, 2])
@pytest.mark.parametrize(
    ("slower", "window"), [(4, 3), (4, 4), (2, 3), (2, 4), (2, 12), (1.5, 8), (1, 3), (1, 12), (0.5, 2), (0.5, 12)]
)
def test_stalls_are_what_the_links_make_of_them(slower, backward, window, lead_ns):
    layers, copy_ns = 40, int(slower * C)
    theory = [max(0, (layers - window) * copy_ns - (layers - 1) * ns) for ns in (C, backward * C)]
    training = run(4, window=window, copy_ns=copy_ns, backward_ns=backward * C, lead_ns=lead_ns)
    for step, found in enumerate(training.stalls):
        assert found[2] == pytest.approx(found[0] + found[1], abs=1000)  # the books say what the clock says
        if step or window <= 4:
            assert sum(found[:2]) == pytest.approx(sum(theory), rel=0.05, abs=1000)
    learned = training.stalls[-1]
    assert learned[0] == pytest.approx(theory[0], rel=0.05, abs=1000)
    assert learned[1] == pytest.approx(theory[1], rel=0.05, abs=1000)


def test_a_fast_link_is_never_waited_for_once_the_order_is_known():
    order = [39, *range(39)]
    training = run(4, copy_ns=C // 2, window=6, lead_ns=0, order=order)
    unknown, *known = training.stalls
    assert unknown[1] >= 30 * C // 2  # nearly each payload is asked for before anybody has thought of it
    assert known == [(0, 0, 0)] * 3
    assert training.outcomes() == (40, 0, 0)


def test_once_the_order_is_known_some_steps_are_timed_and_their_figures_stay():
    with simulation(timed=True) as device:
        training, timed = Training(device, layers=40, window=4, copy_ns=2 * C), []
        for _ in range(30):
            training.step(C, range(39, -1, -1))
            timed.append(device.timing)
        training.close()
    assert [step for step, found in enumerate(timed, 1) if found] == [
        *range(1, TIMED_STEPS + 3),
        16,
        24,
    ]  # the first step's order is news
    assert len(set(training.stalls[1:])) == 1
    assert training.stalls[-1][2] > 0


def pipeline(device, copy_ns, batches=6, layers=30):
    """The forward of one batch takes turns with the backward of the one before, layer by layer; ns of stall in all."""
    training = Training(device, layers=layers, window=6, copy_ns=copy_ns)
    before, stalls = [], []
    for _ in range(batches):
        training.store.start()
        begin, forward, entries = training.now_ns, training.store.begin(CPU), []
        for i in range(layers):
            entries.append(training.put(i, forward))
            if before:
                training.get(before.pop(), C)
        training.store.end(forward)
        compute_ns = (2 if stalls else 1) * layers * C
        stalls.append(training.now_ns - begin - compute_ns)
        before = entries
        assert training.end() == pytest.approx(stalls[-1], abs=1000)
    entries.clear()
    training.close()
    return stalls


def test_both_links_are_busy_at_once(monkeypatch):
    """Each link has a copy of 1.9 C for each 2 C of compute: time for both only if they run beside each other."""
    with simulation(timed=True, lead_ns=10 * C) as device:
        stalls = pipeline(device, int(1.9 * C))
    assert max(stalls[2:]) <= 0.05 * 2 * 30 * C

    init = HostTier.__init__

    def one_stream(self, *args):
        init(self, *args)
        self._fetch = self._offload

    monkeypatch.setattr(HostTier, "__init__", one_stream)
    with simulation(timed=True, lead_ns=10 * C) as device:
        stalls = pipeline(device, int(1.9 * C))
    # One stream carries 30 copies out, and back those that are not among the 6 still on their way, beside 60 C of work.
    assert stalls[2:] == pytest.approx([(30 + 30 - 6) * 1.9 * C - 60 * C] * len(stalls[2:]), rel=0.05)
