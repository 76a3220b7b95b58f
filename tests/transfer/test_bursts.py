"""The window of a link that is slower than compute: blocks of a Llama, as an H100 ran them, in virtual time.

Bytes are 1/256 of the real ones, and so is the link. A step without copies takes 220 ms, and its copies 214 each way.
"""

import pytest
import torch

from actstore import Window
from actstore.codecs import Raw
from actstore.store.store import Store
from actstore.store.tierset import StoreOptions
from actstore.transfer import engine
from actstore.transfer import window as bounds
from actstore.transfer.timekeeper import Bursts
from tests.simulation import install, simulation
from tests.transfer.programs import CPU, Owned

SCALE, MIB, MS = 256, 2**20, 1_000_000
GBPS = 54.6
RAW = Raw()

# MiB that forward saves, and the ms that it computes before.
FORWARD = (
    (64, 0.1), (64, 0.2), (2, 0.8), (2, 0.2), (2, 0.1), (2, 0.1), (16, 0.2), (64, 0.2), (16, 0.2), (64, 1.3), (1, 0.0),
    (64, 0.6), (64, 0.2), (224, 1.6), (64, 0.3), (224, 1.6), (224, 0.3), (224, 0.4),
)  # fmt: skip
AFTER_FORWARD_MS = 0.8
# What backward reads, and the ms that it computes after. Attention is 8 ms without a read.
BACKWARD = (
    (17, 2.4), (15, 0.1), (16, 0.5), (14, 2.4), (13, 0.3), (12, 2.4), (11, 0.2), (9, 0.6), (6, 0.1), (7, 0.0), (8, 0.0),
    (10, 8.1), (3, 0.1), (2, 0.1), (5, 0.1), (4, 0.1), (1, 0.9), (0, 0.3),
)  # fmt: skip
BLOCKS = 8
MOVED = BLOCKS * sum(mib for mib, _ in FORWARD) * MIB // SCALE
LINK_MS = 2 * MOVED * SCALE / GBPS / 1e6


@pytest.fixture(autouse=True)
def scaled(monkeypatch):
    install(monkeypatch)
    for name in ("DEVICE_WINDOW_NBYTES", "SMALL_NBYTES", "PARCEL_NBYTES"):
        monkeypatch.setattr(engine, name, getattr(engine, name) // SCALE)
    monkeypatch.setattr(bounds, "MIN_BOUND_NBYTES", bounds.MIN_BOUND_NBYTES // SCALE)


def run(steps, window=None, gbps=GBPS, free_nbytes=8 * 2**30 // SCALE):
    """Return for each step its ms, and the peak of held bytes."""
    found = []
    with simulation(timed=True, lead_ns=1000 * MS) as device:
        device.free_nbytes = free_nbytes
        device.links["out"].gbps = device.links["in"].gbps = gbps / SCALE
        store = Store(StoreOptions(window=Window(window)))
        store.place(CPU).tier("host")
        sources = {mib: torch.zeros(mib * MIB // SCALE, dtype=torch.uint8) for mib, _ in FORWARD}
        for _ in range(steps):
            store.start()
            begin, forward, blocks = device.current().now_ns, store.begin(CPU), []
            for block in range(BLOCKS):
                blocks.append([])
                for site, (mib, ms) in enumerate(FORWARD):
                    device.compute(int(ms * MS))
                    entry = Owned(store, 100 * block + site)
                    route = store.route(entry.account, sources[mib], RAW, ("host",))
                    assert store.put(entry, sources[mib], route, sources[mib].nbytes, forward)
                    blocks[-1].append(entry)
                    del entry
                device.compute(int(AFTER_FORWARD_MS * MS))
            store.end(forward)
            turn = device.current().now_ns
            while blocks:
                entries = blocks.pop()
                for site, ms in BACKWARD:
                    store.get(entries[site], torch.empty(entries[site].bound.nbytes, dtype=torch.uint8))
                    entries[site] = None  # backward frees it
                    device.compute(int(ms * MS))
            now = device.current().now_ns
            device.scheduler.host_may_wait = True
            device.record(device.current()).result()
            device.scheduler.host_may_wait = False
            store.poll()
            found.append(((turn - begin) / MS, (now - turn) / MS, store.ledger.peak))
        device.scheduler.host_may_wait = True
        store.close()
    return found


def times_link(step):
    forward_ms, backward_ms, _ = step
    return (forward_ms + backward_ms) / LINK_MS


def test_bytes_fetched_ahead_follow_the_longest_time_without_a_read():
    first, second, _, *learned = run(6)
    assert times_link(second) > 1.12  # a window is 5 ms of the link, attention's backward 8
    assert max(map(times_link, learned)) <= 1.02
    assert max(peak for *_, peak in learned) <= second[2] + MOVED // bounds.BURST_DIVISOR - 2**20
    assert learned[-1][0] == first[0]  # no more bytes wait on the device at the end of forward


def test_a_faster_link_needs_few_bytes_more():
    _, second, *_, last = run(6, gbps=4 * GBPS)
    assert last[1] < second[1] - 5
    assert last[2] < second[2] + 2**28 // SCALE


@pytest.mark.parametrize("told", [{"window": MIB}, {"free_nbytes": 0}], ids=["the user gives it", "no memory is free"])
def test_the_bound_stays_where(told):
    _, *later = run(5, **told)
    assert len({peak for *_, peak in later}) == 1
    assert len({round(sum(ms), 3) for *ms, _ in later}) == 1


def test_at_most_an_eighth_of_what_moves_comes_back_early():
    slow = run(6, gbps=GBPS / 8, free_nbytes=2**40)
    assert max(peak for *_, peak in slow) <= slow[1][2] + MOVED // bounds.BURST_DIVISOR - 2**20


def test_a_gap_counts_as_far_as_compute_waits_after_it():
    bursts = Bursts(1000)
    assert bursts.wanted_nbytes() == 1000
    bursts.copied(0, 100, 500)
    bursts.copied(400, 500, 500)  # a gap of 300
    bursts.copied(500, 550, 250)
    assert bursts.wanted_nbytes() == 1000
    bursts.stalls += [(50, 400), (450, 200)]
    assert bursts.wanted_nbytes() == 1000 + 200 * 5
    bursts.copied(700, 750, 250)  # another one, half as long
    bursts.stalls.append((750, 1000))
    assert bursts.wanted_nbytes() == 1000 + 300 * 5
