"""Host threads that stay consistent when Ctrl-C interrupts the main thread."""

from __future__ import annotations

import atexit
import os
from _thread import start_new_thread
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, TypeVar
from weakref import WeakSet, ref

from actstore.base.job import Job
from actstore.errors import StateError

T = TypeVar("T")


class Threads:
    """`count` threads that begin jobs in the order of their submission. Thread-safe.

    They start with the first job. They end with `shutdown`, with the last reference to this object, or with the
    interpreter, which waits for the jobs that run and cancels the rest. An error of a job stays in the job.

    Notes
    -----
    Not for a forked child, in which the threads do not exist.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._pid = os.getpid()
        self._closed = ""
        self._queue: SimpleQueue[Any] = SimpleQueue()  # of jobs; any other item ends the threads
        self._end = ref(self, self._queue.put)  # one call of a C function, which no interrupt can break off
        self._threads: list[Thread] = []
        self._start_lock = Lock()  # held by threads that start threads, never by the main thread
        self._starting: Job[None] | None = None
        _all.add(self)

    def submit(self, call: Callable[..., T], /, *args: Any) -> Job[T]:
        """Make a thread call `call(*args)`.

        Raises
        ------
        StateError : after `shutdown` or the end of the interpreter, and in a forked child
        RuntimeError : the system gives no thread
        """
        job = Job(call, *args)
        self.begin(job)
        return job

    def begin(self, job: Job[Any]) -> None:
        """Make a thread run a job. Errors as of `submit`; after an interrupt the job may run or not."""
        if self._pid != os.getpid():
            raise StateError("these threads are of the parent of a forked process. The child makes its own.")
        self._check_open()
        if len(self._threads) < self._count:
            self._start()
        job.wait_for(self._threads)
        self._queue.put(job)
        if self._closed and job.cancel(StateError("this was submitted too late.")):  # closed by another thread
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"no job can begin after {self._closed}.")

    def shutdown(self) -> None:
        """Wait for all jobs, and end the threads. No job can be submitted any more."""
        self._close("shutdown")

    def _start(self) -> None:
        """Make a thread start the threads: a start waits on a `Condition`, and only the main thread is interrupted."""
        starting = self._starting
        if starting is None or (starting.done() and starting.exception() is not None):
            starting = Job(self._start_all)
            start_new_thread(
                starting.run, ()
            )  # twice, where an interrupt comes just now: the second run then finds the threads
            self._starting = starting
        if not self._threads and (error := starting.exception()) is not None:
            raise RuntimeError(str(error)) from error

    def _start_all(self) -> None:
        with self._start_lock:
            while len(self._threads) < self._count:
                number = len(self._threads)
                thread = Thread(target=_work, args=(self._queue, self._end), name=f"{self._name}_{number}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    if not number:
                        raise
                    return  # fewer threads are enough
                self._threads.append(thread)

    def _cancel(self, why: str) -> None:
        self._closed = self._closed or why
        try:
            while True:
                job = self._queue.get_nowait()
                if isinstance(job, Job):
                    job.cancel(StateError(f"this had not begun at {why}."))
        except Empty:
            return

    def _close(self, why: str) -> None:
        self._closed = self._closed or why
        if self._pid != os.getpid():  # the threads do not exist in a forked child
            return
        self._queue.put(None)
        if self._starting is not None:
            self._starting.exception()
        for thread in self._threads:
            thread.join()


INTERPRETER_END = "interpreter shutdown"


def _work(queue: SimpleQueue[Any], end: ref[Threads]) -> None:
    """Run jobs until another item comes: `end`, which the thread keeps, puts one when its `Threads` die."""
    me = current_thread()
    while isinstance(job := queue.get(), Job):
        job.run(me)
        del job
    queue.put(job)  # for the next thread


_all: WeakSet[Threads] = WeakSet()


def _end_all() -> None:
    """Cancel the jobs that have not begun, and wait for the rest, which use the memory of the ending interpreter."""
    for threads in list(_all):
        threads._cancel(INTERPRETER_END)
        threads._close(INTERPRETER_END)


atexit.register(_end_all)
