"""The interface of a compute device: streams, events, memory and copies.

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
        """Make a thread call `job(*args)`; jobs begin in the order of their submission."""

    def shutdown(self) -> None:
        """Wait for all jobs, and end the threads."""


class Device(ABC):
    """A compute device. Thread-safe.

    A stream is opaque: work queued on one stream runs in order, and only tickets order two streams. On a device with
    host memory (`on_host`) the only stream is None, the calling thread. Its work is complete when a call returns.

    Attributes
    ----------
    torch_device : the device as torch names it
    on_host : whether its memory is host memory
    timing : whether copies and waits are timed; without it the host makes fewer calls, and their tickets have no span
    """

    torch_device: torch.device
    on_host: bool
    timing: bool = True

    def time(self, *, timing: bool) -> None:
        """Time copies and waits from now on, or stop doing so."""
        self.timing = timing

    @abstractmethod
    def current(self) -> Any:
        """Return the stream on which the calling thread computes now. Do not cache it: it changes."""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` the calling thread's current one for a while."""

    @abstractmethod
    def stream(self) -> Any:
        """Create a stream beside the current one."""

    @abstractmethod
    def record(self, stream: Any) -> Ticket:
        """Return a ticket for the completion of all work queued on `stream` so far."""

    @abstractmethod
    def mark(self, stream: Any) -> Ticket:
        """Return a ticket as `record` does; its `span` begins and ends when `stream` comes to this point."""

    @abstractmethod
    def wait(self, stream: Any, ticket: Ticket) -> Ticket | None:
        """Make `stream` wait for `ticket` before its later work, and measure how long it waits.

        Returns
        -------
        Ticket : its `span` is the time waited; None when the operation was complete already, and without `timing`

        Raises
        ------
        TransferError, PayloadError, StateError : work of a host thread, which the caller waits for, has failed
        """

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate uninitialized uint8 device memory for the current stream, at a multiple of a page on a CPU.

        Another stream may use it only after the current one has come to this point: the memory may be in use before.
        """

    def spare_nbytes(self) -> int:
        """Return bytes that no step has needed so far; 0 where they are unknown."""
        return 0

    def allocated(self, *, reset: bool = False) -> tuple[int, int] | None:
        """Return the bytes that the allocator has given out: now, and their peak; None where they are not counted.

        Parameters
        ----------
        reset : whether the peak begins anew first
        """
        return None

    def recycles(self, nbytes: int) -> bool:
        """Return whether freed memory of `empty` is reused for tensors of about its size, without new pages."""
        return False

    @abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor | None:
        """Allocate pinned uint8 host memory, page-aligned, for asynchronous copies; return None when refused.

        `unpin`, or the end of the process, returns it to the system.
        """

    @abstractmethod
    def unpin(self, memory: torch.Tensor) -> None:
        """Return memory of `pinned` to the system. No copy may run on it, and the caller must not use it again."""

    @abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any, after: Iterable[Ticket] = ()) -> Ticket:
        """Queue a copy on `stream`, after all of `after`.

        Returns
        -------
        Ticket : complete when the copy is; its `span` is the time of the copy. The caller frees or overwrites either
            side only after it.
        """

    @abstractmethod
    def workers(self, count: int, name: str) -> Workers:
        """Return `count` host threads, whose names begin with `name`."""
