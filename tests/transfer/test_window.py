"""Bytes on their way: bounded, with room for one that is larger than the bound."""

from hypothesis import given
from hypothesis import strategies as st

from actstore.transfer.window import FlightWindow, Lookahead

MIB = 2**20


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
