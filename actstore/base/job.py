"""Jobs: calls that another thread makes, and their results.

An interrupt (Ctrl-C) may end any Python function of the main thread between two of its instructions. That includes the
enter methods of `threading.Condition`, which then stays locked for ever. A job is therefore made of steps that are
atomic to interrupts: each is one call of a function written in C. Each waiter sleeps on a lock of its own.
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

POLL_INTERVAL_S = 1.0  # a waiter checks this often whether the thread that it waits for still lives


class Job(Generic[T]):
    """A call that a thread makes once. Thread-safe, and intact after an interrupt at any moment.

    The job drops the function, its arguments and the frames of an error before it is done.

    Attributes
    ----------
    crew : the threads; one runs the job
    runner : the thread that runs it
    """

    __slots__ = ("_call", "_done", "_error", "_outcome", "_waiting", "crew", "runner")

    def __init__(self, call: Callable[..., T], /, *args: Any) -> None:
        self._call: list[Callable[[], T]] = [partial(call, *args)]  # the thread that pops it has begun the job
        self._waiting: deque[LockType] = deque()
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._done = False
        self.crew: list[Thread] = []
        self.runner: Thread | None = None

    @staticmethod
    def failed(error: BaseException) -> Job[Any]:
        """Return a job that has ended with an error."""
        job: Job[Any] = Job(int)
        job.cancel(error.with_traceback(None))  # whose frames hold tensors of the caller
        return job

    def wait_for(self, crew: list[Thread]) -> None:
        """Note the threads; one runs the job."""
        self.crew = crew

    def run(self, runner: Thread | None = None) -> None:
        """Make the call on this thread, unless it has started or was canceled. An error of the call stays in the job.

        `runner` is this thread, for waiters that check whether it lives.
        """
        self.runner = runner
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
        """End a job that has not begun with an error. Return False where it had begun."""
        try:
            self._call.pop()
        except IndexError:
            return False
        self._end(None, error)
        return True

    def done(self) -> bool:
        """Return whether the job has ended, without waiting."""
        return self._done

    def exception(self) -> BaseException | None:
        """Wait for the end, and return the error that the call raised, or None.

        The job ends with a TransferError where the thread that runs it has died, or all that could run it.
        """
        own = None
        while not self._done:
            if own is None:
                own = allocate_lock()
                own.acquire()
                self._waiting.append(own)
            elif not own.acquire(timeout=POLL_INTERVAL_S) and self._is_lost() and not self._done:
                self._call.clear()
                self._end(None, TransferError("the host thread that was to do this has died."))
        return self._error

    def result(self) -> T:
        """Wait for the end, and return the result of the call.

        Raises
        ------
        BaseException : the error of the call
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
            waiting.popleft().release()  # a later waiter sees `_done`

    def _is_lost(self) -> bool:
        crew = self.crew if self.runner is None else [self.runner]
        return bool(crew) and not any(thread.is_alive() for thread in crew)


def finish(jobs: Iterable[Job[Any]]) -> None:
    """Wait for the end of all jobs. An interrupt meanwhile is raised after that."""
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
    """Clear the frames of an error, so that they hold no tensors. Its traceback still tells where it was raised."""
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
