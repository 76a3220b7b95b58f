"""What the store needs of a compute device: streams, points in their order, memory and copies.

Three kinds implement it: torch's accelerators, the CPU, and a simulation in the tests, on which the whole store runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from actstore.base.job import Job
from actstore.base.ticket import Ticket

T = TypeVar("T")


class Workers(Protocol):
    """Host threads."""

    def submit(self, job: Callable[..., T], /, *args: Any) -> Job[T]:
        """Have a thread call `job(*args)`; jobs begin in the order of their submission."""

    def shutdown(self) -> None:
        """Wait for all jobs, and end the threads."""


class Device(ABC):
    """A compute device. Thread-safe.

    A stream is opaque: work queued on one runs in order, and two are ordered by tickets alone. On a device whose memory
    is the host's (`on_host`) the only stream is None: the calling thread, and its work is done when a call returns.

    Attributes
    ----------
    torch_device : the device as torch names it
    on_host : whether its memory is host memory
    """

    torch_device: torch.device
    on_host: bool

    @abstractmethod
    def current(self) -> Any:
        """The stream on which the calling thread computes now. Never remembered: it changes."""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` the calling thread's current one for a while."""

    @abstractmethod
    def stream(self) -> Any:
        """A new stream beside it."""

    @abstractmethod
    def record(self, stream: Any) -> Ticket:
        """The promise that all work queued on `stream` so far is complete."""

    @abstractmethod
    def mark(self, stream: Any) -> Ticket:
        """Like `record`; the ticket's `span` begins and ends at the moment when `stream` comes to this point."""

    @abstractmethod
    def wait(self, stream: Any, ticket: Ticket) -> Ticket | None:
        """Order what is queued on `stream` from now on after `ticket`, and measure how long the stream waits.

        Returns
        -------
        Ticket : its `span` is the time waited; None when the operation was complete already

        Raises
        ------
        TransferError, PayloadError, StateError : work of a host thread, which the caller waits for, has failed
        """

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 memory of the device, at a multiple of a page on a CPU, for work on the current stream.

        Another stream may use it only after the current one has come to this point: the memory may be in use before.
        """

    @abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor | None:
        """Uint8 host memory, page-aligned, that the device copies from and to without waiting; None when refused.

        It is returned to the system by `unpin`, or when the process ends.
        """

    @abstractmethod
    def unpin(self, memory: torch.Tensor) -> None:
        """Return what `pinned` gave. No copy may run on it, and nobody uses it again."""

    @abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any, after: Iterable[Ticket] = ()) -> Ticket:
        """Queue a copy on `stream`, after all of `after`.

        Returns
        -------
        Ticket : complete when the copy is; its `span` is the time that the copy took. Whoever frees or overwrites
            either side comes after it.
        """

    @abstractmethod
    def workers(self, count: int, name: str) -> Workers:
        """`count` host threads, their names beginning with `name`."""
