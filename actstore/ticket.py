"""Promises about bytes in motion."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

from actstore.errors import StateError, TransferError


class Ticket(ABC):
    """The promise that a write or a read will be complete."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the bytes have left the source or reached the target, without waiting."""

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
    """A write by a worker thread, whose source may be free earlier than its end (`copied`).

    A forked child has no worker: nothing waits there for what the parent still writes.
    """

    def __init__(self, future: Future[None], copied: Ticket | None = None) -> None:
        self._future = future
        self._copied = copied
        self._pid = os.getpid()

    def ready(self) -> bool:
        if self._copied is not None:
            return self._copied.ready()
        return self._pid != os.getpid() or self._future.done()

    def wait_on(self, stream: Any) -> None:
        if self._copied is not None:
            self._copied.wait_on(stream)
        elif self._pid == os.getpid():
            self._future.exception()  # waits; a failure is told by result()

    def result(self) -> None:
        if self._pid != os.getpid():
            raise StateError("a forked child cannot wait for the writes of its parent; run backward in the parent")
        error = self._future.exception()
        if error is not None:  # a new error for each caller, who will add where it happened
            raise TransferError(str(error) or repr(error), **getattr(error, "facts", {})) from error
