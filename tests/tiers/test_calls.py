"""Calls that end by a deadline."""

import threading

import pytest

from actstore.tiers.calls import TimedCalls


def test_a_call_returns_and_raises_on_one_thread():
    calls = TimedCalls("calls")
    threads = {calls.make(threading.current_thread, wait_s=60) for _ in range(3)}
    assert len(threads) == 1
    with pytest.raises(ZeroDivisionError):
        calls.make(divmod, 1, 0, wait_s=60)
    calls.end(60)
    assert not threads.pop().is_alive()


def test_a_call_that_does_not_return_keeps_its_thread():
    calls, event = TimedCalls("calls"), threading.Event()
    first = calls.make(threading.current_thread, wait_s=60)
    with pytest.raises(TimeoutError):
        calls.make(event.wait, wait_s=0.01)
    second = calls.make(threading.current_thread, wait_s=60)
    assert first.is_alive()
    assert second is not first
    event.set()
    first.join(60)
    assert not first.is_alive()  # it ends by itself once its call returns
    calls.end(60)
    assert not second.is_alive()
