"""The engine on a tier whose copies end when the test says so."""

import gc

import pytest

from actstore.devices import Cpu
from actstore.errors import StateError, TransferError
from actstore.transfer.engine import PARCEL_NBYTES, SMALL_NBYTES
from actstore.transfer.parcel import ParcelState
from tests.transfer.bench import KIB, MIB, Bench


@pytest.fixture
def bench():
    return Bench()


def test_a_large_payload_leaves_at_once_and_comes_back(bench):
    berth = bench.put(2 * MIB, 7)
    assert berth.parcel.state is ParcelState.OFFLOADING
    assert bench.figures == (2 * MIB, 0)
    bench.tier.copies[0].end()
    bench.engine.poll()
    assert berth.parcel.state is ParcelState.RESIDENT
    assert berth.parcel.buffer is None
    assert bench.figures == (0, 2 * MIB)
    for _ in range(2):
        assert bench.get(berth) == 7
        assert berth.parcel.state is ParcelState.RESIDENT
    assert bench.outcomes == (0, 0, 2)
    bench.drop(berth)
    assert bench.figures == (0, 0)
    assert len(bench.tier.freed) == 1


def test_what_is_still_on_the_device_is_not_fetched(bench):
    berth = bench.put(2 * MIB, 5)
    assert bench.get(berth) == 5
    assert len(bench.tier.copies) == 1
    assert bench.tier.waits == 0
    assert bench.outcomes == (1, 0, 0)
    bench.drop(berth)
    assert berth.parcel.state is ParcelState.DROPPED
    assert len(bench.engine._traffic.leaving) == 1  # the write may still read the buffer
    bench.tier.copies[0].end()


def test_small_payloads_travel_together(bench):
    berths = [bench.put(300 * KIB, i) for i in range(20)]
    assert len({berth.parcel for berth in berths}) == 2
    assert len(bench.tier.copies) == 1  # the first is full
    bench.engine.flush(bench.run)
    assert [copy.src.numel() for copy in bench.tier.copies] == [13 * 300 * KIB, 7 * 300 * KIB]
    for copy in bench.tier.copies:
        copy.end()
    bench.engine.poll()
    assert bench.figures == (0, 20 * 300 * KIB)
    assert [bench.get(berth) for berth in reversed(berths)] == list(range(19, -1, -1))
    assert len(bench.tier.copies) == 4  # each parcel came back once
    bench.drop(*berths)
    assert bench.tier.left == 2**40


def test_a_parcel_is_free_when_its_last_payload_is(bench):
    berths = [bench.put(100 * KIB, i) for i in range(3)]
    bench.engine.flush(bench.run)
    bench.drop(berths[1], berths[0])
    assert bench.tier.freed == []
    assert bench.get(berths[2]) == 2
    bench.drop(berths[2])
    assert len(bench.tier.freed) == 1
    bench.tier.copies[0].end()


def test_an_open_parcel_can_be_read_and_dropped(bench):
    berth = bench.put(100 * KIB, 3)
    assert berth.parcel.state is ParcelState.OPEN
    assert bench.get(berth) == 3
    bench.drop(berth)
    assert bench.tier.copies == []
    assert len(bench.tier.freed) == 1


@pytest.mark.parametrize("nbytes", [0, 1, SMALL_NBYTES - 64, SMALL_NBYTES, PARCEL_NBYTES + 1])
def test_sizes(bench, nbytes):
    berth = bench.engine.board(bench.run, bench.tier, nbytes, bench.account)
    assert berth.memory.numel() == nbytes
    assert berth.memory.data_ptr() % 64 == 0 or nbytes == 0
    berth.memory.fill_(9)
    bench.engine.depart(berth)
    bench.engine.flush(bench.run)
    assert bench.tier.copies[0].src.numel() % 4096 == 0
    bench.tier.copies[0].end()
    bench.engine.poll()
    assert bench.engine.arrive(berth).eq(9).all()
    bench.engine.leave(berth)
    bench.drop(berth)


def test_a_payload_that_serves_several_stays_until_all_have_read_it(bench):
    berth = bench.put(2 * MIB, 7)
    berth.readers = 2
    bench.tier.copies[0].end()
    bench.engine.poll()
    for _ in range(2):
        assert bench.get(berth) == 7
        assert berth.parcel.state is ParcelState.READY
        assert bench.get(berth) == 7
        assert berth.parcel.state is ParcelState.RESIDENT
    assert bench.outcomes == (2, 0, 2)
    bench.drop(berth)


def test_a_payload_that_lands_between_two_readers_stays(bench):
    berths = [bench.put(2 * MIB, i) for i in range(6)]
    berths[5].readers = 2
    for copy in bench.tier.copies[:5]:
        copy.end()
    assert bench.get(berths[5]) == 5  # fetches others ahead, as many as there may be
    bench.tier.copies[5].end()
    assert bench.get(berths[5]) == 5
    assert bench.outcomes == (2, 0, 0)
    bench.drop(*berths)
    for copy in bench.tier.copies:
        copy.end()


# -- windows ----------------------------------------------------------------------------------------------------------


def test_a_full_window_waits_for_the_oldest_only():
    bench = Bench(window_nbytes=4 * MIB)
    berths = [bench.put(2 * MIB, i) for i in range(3)]
    assert bench.tier.waits == 1
    assert [copy.done for copy in bench.tier.copies] == [True, False, False]
    assert not bench.engine.admits(bench.run, bench.tier, 1 * MIB)
    bench.tier.copies[1].end()
    assert bench.engine.admits(bench.run, bench.tier, 2 * MIB)
    assert [bench.get(berth) for berth in berths] == [0, 1, 2]
    assert bench.tier.waits == 3  # the two that had left
    bench.drop(*berths)
    bench.tier.copies[2].end()


def test_more_than_the_window_goes_alone():
    bench = Bench(window_nbytes=1 * MIB)
    first, second = bench.put(8 * MIB, 1), bench.put(8 * MIB, 2)
    assert [copy.done for copy in bench.tier.copies] == [True, False]
    bench.drop(first, second)
    bench.tier.copies[1].end()


def test_a_full_window_sends_what_waits_for_more():
    bench = Bench(window_nbytes=4 * MIB)
    small = bench.put(100 * KIB, 1)
    large = bench.put(4 * MIB, 2)
    assert small.parcel.state is ParcelState.RESIDENT
    assert bench.tier.waits == 1
    bench.drop(small, large)
    bench.tier.copies[1].end()


def test_a_full_tier_is_a_value(bench):
    bench.tier.left = 300 * KIB
    assert bench.put(2 * MIB) is None
    small = bench.put(100 * KIB, 4)  # there is no room for a parcel of several
    assert small is not None
    assert small.parcel.state is ParcelState.OFFLOADING  # it fills a parcel of its own, which leaves at once
    assert bench.put(300 * KIB) is None
    bench.engine.flush(bench.run)
    assert bench.get(small) == 4
    bench.drop(small)
    bench.tier.copies[0].end()


# -- look-ahead -------------------------------------------------------------------------------------------------------


def step(bench, order, count=8, nbytes=2 * MIB):
    """One forward and its backward; every copy has ended when something is asked for. Returns the outcomes."""
    bench.ledger.start()
    bench.engine.start(0)
    run = bench.engine.begin()
    berths = [bench.put(nbytes, i, run) for i in range(count)]
    bench.engine.flush(run)
    for serial in order:
        for copy in bench.tier.copies:
            copy.end()
        assert bench.get(berths[serial]) == serial
        bench.drop(berths[serial])
    bench.drop(*(berth for i, berth in enumerate(berths) if i not in order))
    return bench.outcomes


def test_the_first_step_foresees_the_last_first():
    assert step(Bench(), [7, 6, 5, 4, 3, 2, 1, 0]) == (7, 0, 1)


def test_later_steps_miss_nothing():
    bench = Bench()
    order = [2, 7, 0, 5, 6, 1, 4, 3]
    step(bench, order)
    assert step(bench, order) == (8, 0, 0)


def test_a_part_of_the_graph():
    bench = Bench()
    step(bench, [7, 3, 1])
    assert step(bench, [7, 3, 1]) == (3, 0, 0)
    assert step(bench, [0, 1, 2]) == (0, 0, 3) or bench.outcomes[2] <= 3


def test_what_is_fetched_ahead_is_bounded():
    bench = Bench(window_nbytes=64 * MIB)
    berths = [bench.put(2 * MIB, i) for i in range(8)]
    for copy in bench.tier.copies:
        copy.end()
    bench.engine.poll()
    assert bench.engine._traffic.quota.lookahead.limit_nbytes == 4 * MIB
    bench.engine.arrive(berths[7])
    assert bench.figures[0] == 6 * MIB  # itself, which is not ahead any more, and the next two
    assert bench.engine._traffic.quota.lookahead.nbytes == 4 * MIB
    bench.engine.leave(berths[7])
    bench.drop(*berths)
    for copy in bench.tier.copies:
        copy.end()


def test_a_late_fetch_is_told_and_widens_the_look_ahead():
    bench = Bench(window_nbytes=64 * MIB)
    berths = [bench.put(2 * MIB, i) for i in range(8)]
    for copy in bench.tier.copies:
        copy.end()
    bench.engine.poll()
    assert bench.get(berths[7]) == 7
    assert bench.get(berths[6]) == 6
    assert bench.outcomes == (0, 1, 1)
    assert bench.engine._traffic.quota.lookahead.limit_nbytes == 8 * MIB
    bench.drop(*berths)
    for copy in bench.tier.copies:
        copy.end()


def test_what_nobody_asks_for_makes_room():
    bench = Bench(window_nbytes=64 * MIB)
    run = bench.run
    berths = [bench.put(2 * MIB, i) for i in range(8)]
    for copy in bench.tier.copies:
        copy.end()
    bench.engine.poll()
    bench.get(berths[7])
    for copy in bench.tier.copies:
        copy.end()
    bench.engine.poll()
    assert berths[6].parcel.state is ParcelState.READY
    bench.get(berths[3])  # a jump: 6 was not wanted
    bench.get(berths[2])
    assert berths[6].parcel.state is ParcelState.RESIDENT
    assert run is berths[6].parcel.run
    bench.drop(*berths)
    for copy in bench.tier.copies:
        copy.end()


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False])
def test_a_failed_write_leaves_the_payload_on_the_device(bench, at_once):
    error = TransferError("the planted disk is broken")
    if at_once:
        bench.tier.refuses = error
    berth = bench.put(2 * MIB, 6)
    if not at_once:
        bench.tier.copies[0].end(error)
    with pytest.warns(RuntimeWarning, match="could not leave the device: the planted disk is broken.* They stay there"):
        bench.engine.poll()
    bench.tier.refuses = None
    assert bench.figures == (2 * MIB, 0)
    assert len(bench.tier.freed) == 1
    assert str(bench.account.note) == "kept: manual failed"
    for _ in range(2):
        assert bench.get(berth) == 6
    bench.tier.refuses = error
    other = bench.put(2 * MIB, 8)  # told once
    assert bench.get(other) == 8
    bench.drop(berth, other)
    assert bench.figures == (0, 0)


def test_a_failed_read_is_told_to_who_asks_and_can_be_repeated(bench):
    berth = bench.put(2 * MIB, 6)
    bench.tier.copies[0].end()
    bench.engine.poll()
    for _ in range(2):
        bench.tier.refuses = TransferError("planted")
        with pytest.raises(TransferError, match="planted"):
            bench.engine.arrive(berth)
    bench.tier.refuses = None
    assert bench.get(berth) == 6
    bench.drop(berth)


def test_a_failed_look_ahead_is_repeated_for_who_asks(bench):
    berths = [bench.put(2 * MIB, i) for i in range(2)]
    for copy in bench.tier.copies:
        copy.end()
    bench.engine.poll()
    assert bench.get(berths[1]) == 1
    bench.tier.copies[-1].end(TransferError("planted"))
    bench.engine.poll()
    assert berths[0].parcel.state is ParcelState.RESIDENT
    assert bench.get(berths[0]) == 0
    bench.drop(*berths)


def test_a_fetch_that_fails_while_somebody_waits(bench):
    berths = [bench.put(2 * MIB, i) for i in range(2)]
    for copy in bench.tier.copies:
        copy.end()
    bench.engine.poll()
    assert bench.get(berths[1]) == 1
    ahead = bench.tier.copies[-1]
    ahead.result = lambda: ahead.end(TransferError("planted")) or (_ for _ in ()).throw(ahead.error)
    with pytest.raises(TransferError, match="planted"):
        bench.engine.arrive(berths[0])
    assert bench.get(berths[0]) == 0
    bench.drop(*berths)


def test_an_encoding_that_fails_leaves_nothing(bench):
    kept = bench.put(100 * KIB, 1)
    berth = bench.engine.board(bench.run, bench.tier, 100 * KIB, bench.account)
    bench.engine.cancel(berth)
    large = bench.engine.board(bench.run, bench.tier, 8 * MIB, bench.account)
    bench.engine.cancel(large)
    assert len(bench.tier.freed) == 1
    bench.engine.flush(bench.run)
    assert bench.get(kept) == 1
    bench.drop(kept)
    assert bench.figures == (0, 0)
    bench.tier.copies[0].end()


def test_memory_that_is_refused_leaves_nothing(bench, monkeypatch):
    def refuse(*_):
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Cpu, "empty", refuse)
        with pytest.raises(MemoryError):
            bench.put(2 * MIB)
    assert len(bench.tier.freed) == 1
    assert bench.tier.left == 2**40
    berths = [bench.put(2 * MIB, i) for i in range(3)]
    for copy in bench.tier.copies:
        copy.end()
    bench.engine.poll()
    with monkeypatch.context() as patch:  # ahead of time it is no error
        bench.engine._traffic.buffers.close()
        taken = []
        empty = Cpu.empty
        patch.setattr(Cpu, "empty", lambda *args: refuse() if taken else taken.append(1) or empty(*args))
        assert bench.get(berths[2]) == 2
    assert bench.get(berths[1]) == 1
    bench.drop(*berths)
    for copy in bench.tier.copies:
        copy.end()


def test_dropped_payloads_cannot_be_read(bench):
    berth = bench.put(2 * MIB)
    bench.drop(berth)
    with pytest.raises(StateError, match="was given back"):
        bench.engine.arrive(berth)
    bench.tier.copies[0].end()


def test_a_drop_while_another_thread_decodes(bench):
    berth = bench.put(2 * MIB, 4)
    bench.tier.copies[0].end()
    memory = bench.engine.arrive(berth)
    bench.drop(berth)
    assert berth.parcel.buffer is not None
    assert memory.eq(4).all()
    bench.engine.leave(berth)
    assert berth.parcel.buffer is None


def test_a_close_while_another_thread_waits(bench):
    berth = bench.put(2 * MIB, 4)
    bench.tier.copies[0].end()
    bench.engine.poll()
    read = bench.tier.read

    def closed_meanwhile(*args):
        ticket = read(*args)
        ticket.wait_on = lambda stream: bench.drop(berth)
        return ticket

    bench.tier.read = closed_meanwhile
    with pytest.raises(StateError, match="Close the store after the last backward"):
        bench.engine.arrive(berth)
    bench.tier.copies[1].end()


def test_close_waits_for_host_threads_only(bench):
    berths = [bench.put(2 * MIB, i) for i in range(3)]
    bench.drop(*berths)
    bench.engine.close()
    assert bench.tier.waits == 0
    assert all(copy.done for copy in bench.tier.copies)
    assert bench.engine._traffic.buffers._idle_nbytes == 0


def test_nothing_is_a_cycle(bench):
    berths = [bench.put(100 * KIB, i) for i in range(3)]
    bench.engine.flush(bench.run)
    parcels = len([o for o in gc.get_objects() if type(o).__name__ == "Parcel"])
    gc.disable()
    try:
        bench.tier.copies[0].end()
        bench.engine.poll()
        bench.drop(*berths)
        bench.tier.copies.clear()
        bench.tier.freed.clear()
        berths.clear()
        assert len([o for o in gc.get_objects() if type(o).__name__ == "Parcel"]) == parcels - 1
    finally:
        gc.enable()


def test_steady_state_allocates_nothing():
    bench = Bench()
    for i in range(6):
        step(bench, [7, 6, 5, 4, 3, 2, 1, 0])
        if i == 2:
            allocated = bench.engine._traffic.buffers.allocated
    assert bench.engine._traffic.buffers.allocated == allocated
