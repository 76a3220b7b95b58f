"""Threads that make calls one after another, and calls that end by a deadline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from weakref import finalize


class CallThread:
    """A thread that makes calls one after another. `give` is one call in C: safe in finalizers."""

    def __init__(self, name: str) -> None:
        calls: SimpleQueue[Any] = SimpleQueue()
        self.give = calls.put
        self._thread = Thread(target=_run, args=(calls,), name=name, daemon=True)
        self._thread.start()
        finalize(self, calls.put, None)

    def end(self, wait_s: float) -> None:
        """End the thread after the calls that were given; wait for that at most `wait_s` seconds."""
        self.give(None)
        self._thread.join(wait_s)


class TimedCalls:
    """Calls into libraries that may never return, on a thread of their own.

    A call that is late keeps its thread, and the next call has another one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: CallThread | None = None

    def make(self, call: Callable[..., Any], *args: Any, wait_s: float) -> Any:
        """Return what a call returns.

        Raises
        ------
        TimeoutError : it has not returned within `wait_s` seconds
        """
        if self._thread is None:
            self._thread = CallThread(self._name)
        answer: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        self._thread.give(partial(_answer, answer, call, args))
        try:
            result, error = answer.get(timeout=wait_s)
        except Empty:
            self._thread = None
            raise TimeoutError from None
        if error is not None:
            raise error
        return result

    def end(self, wait_s: float) -> None:
        """End the thread; wait for that at most `wait_s` seconds."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end(wait_s)


def _run(calls: SimpleQueue[Any]) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        call()
        del call  # or its tensors live until the next one comes


def _answer(answer: SimpleQueue[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer.put((call(*args), None))
    except Exception as error:
        answer.put((None, error))
