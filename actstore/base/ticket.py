"""Promises about bytes in motion."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from actstore.base.job import Job
from actstore.errors import ActstoreError, StateError, TransferError

Span = tuple[int, int]  # begin and end of an operation, on the clock of time.perf_counter_ns


class Ticket(ABC):
    """The promise that an operation on bytes will be complete.

    `on_stream` says whether `wait_on` makes just a stream wait, and never the host.
    """

    on_stream: ClassVar[bool] = False

    @abstractmethod
    def ready(self) -> bool:
        """Return whether the operation is complete or has failed, without waiting."""

    @abstractmethod
    def wait_on(self, stream: Any) -> None:
        """Order `stream` (None: the calling host thread) after the operation.

        A device event makes the stream wait and returns at once; work on a host thread makes the caller wait, and
        raises what `result` raises.
        """

    @abstractmethod
    def result(self) -> None:
        """Make the host wait until the operation has completed.

        Raises
        ------
        TransferError, PayloadError, StateError : the operation failed
        """

    def span(self) -> Span | None:
        """Return when the operation began and ended; None before it is complete, and where it was not measured."""
        return None


class Done(Ticket):
    """An operation that completed before its call returned."""

    def __init__(self, span: Span | None = None) -> None:
        self._span = span

    def span(self) -> Span | None:
        return self._span

    def ready(self) -> bool:
        return True

    def wait_on(self, stream: Any) -> None:
        """Return at once: the operation is complete."""

    def result(self) -> None:
        """Return at once: the operation is complete."""


DONE = Done()


class EventClock(Protocol):
    def ns(self, event: Any) -> int:
        """Return when a timed event of the device happened, on the clock of time.perf_counter_ns."""


class EventTicket(Ticket):
    """An operation on a device that is complete when an event is; the event goes to `idle` when the ticket dies."""

    on_stream = True

    def __init__(
        self, event: Any, begin: Any = None, clock: EventClock | None = None, idle: deque[Any] | None = None
    ) -> None:
        self._event = event
        self._idle = idle
        self._begin = begin
        self._clock = clock

    def __del__(self) -> None:
        if self._idle is not None:
            self._idle.append(self._event)

    def ready(self) -> bool:
        return bool(self._event.query())

    def wait_on(self, stream: Any) -> None:
        if stream is None:
            self._event.synchronize()
        else:
            stream.wait_event(self._event)

    def result(self) -> None:
        self._event.synchronize()

    def span(self) -> Span | None:
        if self._clock is None or not self.ready():
            return None
        end = self._clock.ns(self._event)
        return end - int(self._begin.elapsed_time(self._event) * 1e6), end


class JobTicket(Ticket):
    """The work of all `jobs` on host threads. Each job returns its start and end times.

    Where jobs put copies on a device's stream, `copies` holds their tickets once the jobs are done.
    A forked child has no workers: nothing there waits for the jobs of the parent.
    """

    def __init__(self, jobs: Sequence[Job[Span]], copies: Sequence[Ticket] = ()) -> None:
        self._jobs = jobs
        self._copies = copies
        self._pid = os.getpid()
        self._ended = False

    def ready(self) -> bool:
        if self._ended:
            return True
        for job in self._jobs:
            if not job.done():
                return self._pid != os.getpid()
        for copy in self._copies:
            if not copy.ready():
                return self._pid != os.getpid()
        self._ended = True
        return True

    def wait_on(self, stream: Any) -> None:
        self._finish_jobs()
        for copy in self._copies:
            copy.wait_on(stream)

    def result(self) -> None:
        self._finish_jobs()
        for copy in self._copies:
            copy.result()

    def _finish_jobs(self) -> None:
        if self._pid != os.getpid():
            raise StateError("a forked child cannot wait for the work of its parent. Run backward in the parent.")
        errors = [job.exception() for job in self._jobs]  # waits for all: until then some jobs use the memory
        for error in errors:
            if error is not None:  # a new error for each caller, which adds where it happened
                kind: type[ActstoreError] = TransferError
                if isinstance(error, ActstoreError):
                    kind = type(error)
                    error.__traceback__ = None  # its frames hold the memory that the job worked on
                raise kind(str(error) or repr(error), **getattr(error, "facts", {})) from error

    def span(self) -> Span | None:
        if self._pid != os.getpid() or not self.ready() or any(job.exception() for job in self._jobs):
            return None
        spans = [job.result() for job in self._jobs] + [span for copy in self._copies if (span := copy.span())]
        return (min(begin for begin, _ in spans), max(end for _, end in spans)) if spans else None


class Between(Ticket):
    """The work of a stream from one point to another."""

    on_stream = True

    def __init__(self, begin: Ticket, end: Ticket) -> None:
        self._begin = begin
        self._end = end

    def ready(self) -> bool:
        return self._end.ready()

    def wait_on(self, stream: Any) -> None:
        self._end.wait_on(stream)

    def result(self) -> None:
        self._end.result()

    def span(self) -> Span | None:
        begin, end = self._begin.span(), self._end.span()
        return None if begin is None or end is None else (begin[1], end[0])
