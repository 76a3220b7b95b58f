"""Promises about bytes in motion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, wait
from typing import Any


class Ticket(ABC):
    """The promise that a write or a read will be complete."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the operation has completed, without waiting."""

    @abstractmethod
    def wait_on(self, stream: Any) -> None:
        """Order `stream` (None: the calling host thread) after the bytes have left the source or reached the target.

        A device event makes the stream wait and returns at once; work on a host thread makes the caller wait.
        """

    @abstractmethod
    def result(self) -> None:
        """Make the host wait until the operation has completed.

        Raises
        ------
        TransferError : the operation failed
        """


class Done(Ticket):
    """An operation that completed before its call returned."""

    def ready(self) -> bool:
        return True

    def wait_on(self, stream: Any) -> None:
        """Nothing to wait for."""

    def result(self) -> None:
        """Nothing to wait for."""


DONE = Done()


class EventTicket(Ticket):
    """An operation that is complete when a device event is."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def ready(self) -> bool:
        return bool(self._event.query())

    def wait_on(self, stream: Any) -> None:
        if stream is None:
            self._event.synchronize()
        else:
            stream.wait_event(self._event)

    def result(self) -> None:
        self._event.synchronize()


class FutureTicket(Ticket):
    """An operation on a worker thread, whose source may be free earlier than its end (`copied`)."""

    def __init__(self, future: Future[None], copied: Ticket | None = None) -> None:
        self.future = future
        self._copied = copied

    def ready(self) -> bool:
        return self.future.done()

    def wait_on(self, stream: Any) -> None:
        if self._copied is not None:
            self._copied.wait_on(stream)
        else:
            wait([self.future])  # a failure is told by result()

    def result(self) -> None:
        self.future.result()
