"""Work for another thread, and what came of it.

An interrupt (Ctrl-C) may end any Python function of the main thread between two of its instructions, the enter methods
of `threading.Condition` included, which then stay locked for ever. A job is therefore made of steps that are atomic to
interrupts: each is one call of a function written in C. The lock that a waiter sleeps on is its own.
"""

from __future__ import annotations

import traceback
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from threading import Thread
from typing import Any, Generic, TypeVar

from actstore.errors import TransferError

T = TypeVar("T")

LOOK_SECONDS = 1.0  # how often who waits looks whether the thread that it waits for still lives


class Job(Generic[T]):
    """A call that a thread makes once. Thread-safe, and intact after an interrupt at any moment.

    The function and its arguments are let go of before the job is done, and so are the frames of an error.

    Attributes
    ----------
    crew : the threads of which one is to run it
    runner : the one that does
    """

    __slots__ = ("_call", "_done", "_error", "_outcome", "_waiting", "crew", "runner")

    def __init__(self, call: Callable[..., T], /, *args: Any) -> None:
        self._call: list[Callable[[], T]] = [partial(call, *args)]  # who takes it out has begun the job
        self._waiting: deque[LockType] = deque()
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._done = False
        self.crew: list[Thread] = []
        self.runner: Thread | None = None

    @staticmethod
    def failed(error: BaseException) -> Job[Any]:
        """A job that has ended with an error."""
        job: Job[Any] = Job(int)
        job.cancel(error.with_traceback(None))  # whose frames hold tensors of the caller
        return job

    def run(self) -> None:
        """Make the call on this thread, unless it was begun or cancelled. Never raises what the call raises."""
        try:
            call = self._call.pop()
        except IndexError:
            return
        outcome, error = None, None
        try:
            outcome = call()
        except BaseException as raised:
            error = _without_frames(raised)
        del call
        self._end(outcome, error)

    def cancel(self, error: BaseException) -> bool:
        """End with an error what has not begun; whether it had not."""
        try:
            self._call.pop()
        except IndexError:
            return False
        self._end(None, error)
        return True

    def done(self) -> bool:
        """Whether it has ended, without waiting."""
        return self._done

    def exception(self) -> BaseException | None:
        """Wait for the end; the error that the call raised, or None.

        Where the thread has died that runs it, or all that could, it ends with a TransferError.
        """
        own = None
        while not self._done:
            if own is None:
                own = allocate_lock()
                own.acquire()
                self._waiting.append(own)
            elif not own.acquire(timeout=LOOK_SECONDS) and self._is_lost() and not self._done:
                self._call.clear()
                self._end(None, TransferError("the host thread that was to do this has died"))
        return self._error

    def result(self) -> T:
        """Wait for the end; what the call returned.

        Raises
        ------
        BaseException : what the call raised
        """
        error = self.exception()
        if error is not None:
            raise error
        outcome: T = self._outcome
        return outcome

    def _end(self, outcome: T | None, error: BaseException | None) -> None:
        self._outcome, self._error = outcome, error
        self._done = True
        waiting = self._waiting
        while waiting:
            waiting.popleft().release()  # who comes later sees `_done`

    def _is_lost(self) -> bool:
        crew = self.crew if self.runner is None else [self.runner]
        return bool(crew) and not any(thread.is_alive() for thread in crew)


def finish(jobs: Iterable[Job[Any]]) -> None:
    """Wait for the end of all. An interrupt meanwhile is raised after it."""
    interrupt: BaseException | None = None
    left = list(jobs)
    while left:
        try:
            left[-1].exception()
            left.pop()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _without_frames(error: BaseException) -> BaseException:
    """An error whose traceback tells where it was raised, and whose frames hold nothing any more."""
    error.__traceback__ = None if error.__traceback__ is None else error.__traceback__.tb_next  # without `run` itself
    seen, left = {id(error)}, [error]
    while left:
        one = left.pop()
        traceback.clear_frames(one.__traceback__)
        for other in (one.__cause__, one.__context__):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                left.append(other)
    return error
