"""Bounds on the bytes on their way, and on what waits on the device although a tier has it: a window, or a share."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from actstore import ActivationStore, Disk, Window
from actstore.base.spec import Site
from actstore.transfer import engine, timekeeper
from actstore.transfer import window as bounds
from actstore.transfer.window import BOUND_DIVISOR, MIN_BOUND_NBYTES, FlightWindow, Lookahead, Quota
from tests.transfer.bench import KIB, MIB, Bench

LAYER = (1, 1, 4, 4, 1, 1, 1)  # the sizes that a block of a transformer saves, in units
UNIT = 4 * KIB
SIZES = [UNIT * units for units in LAYER * 6]
SAVED = sum(SIZES)

BOUNDS = {2: 0.5, 4: 0.35, 16: 0.2}  # of what is saved, for so many windows


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(engine, "SMALL_NBYTES", UNIT)  # each payload travels by itself,
    monkeypatch.setattr(timekeeper, "LATE_NS", 0)  # any wait is a late one,
    monkeypatch.setattr(bounds, "MIN_BOUND_NBYTES", 0)  # and no share is too small to be a bound


def step(bench, slow, sizes=SIZES, order=None):
    """One forward and its backward, last first; slow copies end when a stream waits for them, others at once.

    Returns the bytes held at the end of forward, and how many payloads backward found, found late, and missed.
    """

    def tick():
        for copy in [] if slow else bench.tier.copies:
            copy.end()
        bench.tier.copies = [copy for copy in bench.tier.copies if not copy.ready()]
        bench.engine.poll()

    bench.ledger.start()
    bench.engine.start(0)
    run = bench.engine.begin()
    berths = []
    for i, nbytes in enumerate(sizes):
        berths.append(bench.put(nbytes, i, run))
        tick()
    bench.engine.flush(run)
    held = bench.figures[0]
    for i in order or reversed(range(len(sizes))):
        tick()
        assert read(bench, berths[i]) == i
        bench.drop(berths[i])
    end_all(bench)
    return held, bench.outcomes


def read(bench, berth):
    """As the store does on a CPU: what has come back serves as a tensor's memory, until that is gone."""
    tensor = bench.engine.lend(berth, torch.uint8)
    return bench.get(berth) if tensor is None else int(tensor[0])


def end_all(bench):
    for copy in bench.tier.copies:
        copy.end()
    bench.engine.poll()


@pytest.mark.parametrize("slow", [1, 10])
@pytest.mark.parametrize("windows", BOUNDS)
def test_fifty_steps_hold_no_more_than_a_share(windows, slow):
    """The link is slow for some steps, ten make the look-ahead as large as it gets; then it is fast."""
    bench = Bench(window_nbytes=SAVED // windows)
    found = [step(bench, number < slow) for number in range(50)]
    assert max(held for held, _ in found[1:]) <= BOUNDS[windows] * SAVED
    hits, late, misses = (sum(outcomes[i] for _, outcomes in found[slow:]) for i in range(3))
    assert hits + late + misses == (50 - slow) * len(SIZES)
    assert hits >= 0.95 * (hits + late + misses)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("windows", BOUNDS)
def test_fifty_steps_of_a_model_on_a_disk(windows, monkeypatch, disk_folder):
    """Whatever the disk's speed: what is held, and that nothing is asked for before it was thought of."""
    monkeypatch.undo()
    layers, rows, width = 24, 2048, 64
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    window = (layers + 1) * rows * width * 4 // windows
    store = ActivationStore(model, "raw @ disk", tiers=[Disk(disk_folder), Window(window)], min_bytes=0)
    x = torch.randn(rows, width)
    for number in range(50):
        with store:
            loss = model(x).square().mean()
        loss.backward()
        report = store.report()
        if number:
            assert report.held_bytes <= BOUNDS[windows] * report.saved_bytes
            assert report.misses <= 0.05 * (report.hits + report.late + report.misses)
    store.close()


@pytest.mark.parametrize("slow", [True, False])
def test_what_moves_is_less_than_a_window(slow):
    bench = Bench(window_nbytes=2 * SAVED)
    held = [step(bench, slow)[0] for _ in range(5)]
    assert max(held[1:]) <= SAVED / BOUND_DIVISOR


def test_small_payloads_do_not_wait_for_a_parcel_of_the_usual_size(monkeypatch):
    monkeypatch.setattr(engine, "SMALL_NBYTES", MIB)
    bench = Bench()
    held = [step(bench, slow=True)[0] for _ in range(3)]
    assert held[0] == SAVED  # one parcel has room for all, and nothing is known yet
    assert max(held[1:]) <= SAVED / BOUND_DIVISOR


def test_what_backward_reads_first_stays_wherever_forward_saved_it():
    bench = Bench(window_nbytes=SAVED)
    order = [3, 17, *(i for i in reversed(range(len(SIZES))) if i not in (3, 17))]
    found = [step(bench, slow=False, order=order) for _ in range(3)]
    assert [outcomes[2] for _, outcomes in found[1:]] == [0, 0]


def test_room_for_one_payload_is_enough_to_miss_none():
    """A payload that backward reads now takes no room from the next one."""
    sizes = [4 * UNIT] * 12
    bench = Bench(window_nbytes=4 * UNIT)
    found = [step(bench, slow=False, sizes=sizes) for _ in range(3)]
    assert [outcomes for _, outcomes in found[1:]] == [(12, 0, 0)] * 2


def test_a_small_forward_does_not_wait_for_a_large_one_that_is_alive():
    """The bound is a share of what all forwards that are alive move."""
    bench = Bench(window_nbytes=SAVED)
    other = bench.ledger.account(Site("other", 0))
    for _ in range(2):
        large = bench.engine.begin()
        berths = [bench.put(nbytes, i, large) for i, nbytes in enumerate(SIZES)]
        waits = bench.tier.waits
        small = bench.engine.begin()
        bench.account, account = other, bench.account
        berths.append(bench.put(UNIT, 1, small))
        bench.account = account
        assert bench.tier.waits <= waits + 1
        for berth in reversed(berths):
            bench.engine.arrive(berth)
            bench.engine.leave(berth)
            bench.drop(berth)
        end_all(bench)


def test_under_a_budget_the_window_alone_bounds_what_leaves():
    bench = Bench(window_nbytes=SAVED)
    bench.ledger.budget.set(2 * SAVED)
    held = [step(bench, slow=True)[0] for _ in range(3)]
    assert held == [SAVED] * 3


def test_an_engine_tells_its_bound():
    bench = Bench(window_nbytes=SAVED)
    found = []
    for limit in (float("inf"), float("inf"), 2 * SAVED):
        bench.ledger.budget.set(limit)
        run = bench.engine.begin()
        berths = [bench.put(nbytes, 1, run) for nbytes in SIZES]
        found.append(bench.engine.bound_nbytes(run))
        for berth in reversed(berths):
            read(bench, berth)
            bench.drop(berth)
        end_all(bench)
    assert found == [
        SAVED,
        SAVED // BOUND_DIVISOR,
        SAVED,
    ]  # the first knows nothing, and a budget takes the place of both


def test_a_share_bounds_no_less_than_a_few_mebibytes(monkeypatch):
    monkeypatch.setattr(bounds, "MIN_BOUND_NBYTES", MIN_BOUND_NBYTES)
    bench = Bench()
    held = [step(bench, slow=True)[0] for _ in range(3)]
    assert held == [SAVED] * 3
    large = [MIN_BOUND_NBYTES] * 8
    held = [step(bench, slow=True, sizes=large)[0] for _ in range(3)]
    assert MIN_BOUND_NBYTES <= max(held[1:]) <= sum(large) / BOUND_DIVISOR


def test_a_cpu_fetches_less_ahead_while_its_disk_takes_other_bytes(monkeypatch):
    """Both were bounded alone: a busy disk held up twice the bound in memory."""
    monkeypatch.setattr(bounds, "MIN_BOUND_NBYTES", 8 * UNIT)
    bench = Bench(window_nbytes=8 * UNIT)
    bench.engine._traffic.quota.lookahead.limit_nbytes = 8 * UNIT
    done, late = ([bench.put(UNIT, i) for i in range(first, first + 6)] for first in (0, 6))
    for copy in bench.tier.copies[:6]:
        copy.end()
    bench.engine.poll()
    waits = bench.engine._traffic.quota
    assert waits.windows[bench.tier].nbytes == 6 * UNIT
    bench.engine.poll(bench.run)  # backward begins
    assert waits.lookahead.nbytes == 2 * UNIT
    for copy in bench.tier.copies[6:12]:
        copy.end()
    bench.engine.poll(bench.run)
    assert waits.nbytes <= 8 * UNIT
    bench.drop(*done, *late)
    end_all(bench)


def test_what_leaves_and_what_comes_back_share_one_window_on_a_host():
    bench = Bench()
    run = bench.engine.begin()
    for in_turn in (True, False):
        both = Quota(bench.ledger, 100, in_turn=in_turn)
        both.lookahead.widen()
        window = both.window(bench.tier)
        window.nbytes = 60
        assert both.admits(run, 40)
        assert both.admits(run, 41) is not in_turn
        assert both.admits(run, 400) is not in_turn
        window.nbytes = 0
        assert both.admits(run, 400), "one payload always may"


def test_a_window_admits_up_to_its_limit_and_one_of_any_size():
    window = FlightWindow()
    assert window.admits(1000, 100)
    window.nbytes = 60
    assert window.admits(40, 100)
    assert not window.admits(41, 100)


def test_the_lookahead_grows_when_late_and_shrinks_when_in_time():
    ahead = Lookahead(64 * MIB)
    start = ahead.limit_nbytes
    ahead.late(start // 2)
    assert ahead.limit_nbytes == 2 * start
    for _ in range(ahead.PATIENCE - 1):
        ahead.in_time()
    assert ahead.limit_nbytes == 2 * start
    ahead.in_time()
    assert ahead.limit_nbytes == 2 * start * 7 // 8


@given(st.integers(1, 64 * MIB), st.lists(st.booleans(), max_size=300))
def test_the_lookahead_stays_within_its_bounds(most, lates):
    ahead = Lookahead(most)
    for late in lates:
        ahead.late(most // 3) if late else ahead.in_time()
        assert 1 <= ahead.limit_nbytes <= most
        assert ahead.admits(most)


def test_a_large_payload_that_was_late_makes_room_for_two():
    ahead = Lookahead(64 * MIB)
    ahead.late(16 * MIB)
    assert ahead.limit_nbytes == 32 * MIB
    ahead.late(100 * MIB)
    assert ahead.limit_nbytes == 64 * MIB
