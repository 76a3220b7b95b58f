"""A device whose copies run late: each only when the test says so, or when something waits for it, in odd orders."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import Any

import torch

from actstore.base.ticket import Ticket
from actstore.devices import Device, Workers

POISON = 0xEE


class Stream:
    def __init__(self) -> None:
        self.queue: deque[tuple[list[Ticket], Callable[[], object]]] = deque()


class LateTicket(Ticket):
    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.done = False

    def ready(self) -> bool:
        return self.done

    def wait_on(self, stream: Any) -> None:
        if stream is None:
            self.device.run_until(self)
        else:
            stream.queue.append(([self], lambda: None))

    def result(self) -> None:
        self.device.run_until(self)


class LateDevice(Device):
    """Its memory is ordinary CPU memory, so that tests can look into it. Memory that nobody wrote is poisoned.

    Attributes
    ----------
    refuses : whether `pinned` gives nothing
    segments : what `pinned` gave and `unpin` did not take back
    """

    torch_device = torch.device("cpu")
    on_host = False

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.here = threading.local()
        self.main = self.stream()
        self.refuses = False
        self.segments: dict[int, torch.Tensor] = {}
        self.sizes: list[int] = []  # of every segment ever made

    def current(self) -> Stream:
        return getattr(self.here, "stream", self.main)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.here.stream = self.current(), stream
        yield
        self.here.stream = before

    def stream(self) -> Stream:
        stream = Stream()
        self.streams.append(stream)
        return stream

    def record(self, stream: Stream) -> Ticket:
        return self._queue(stream, [], lambda: None)

    def mark(self, stream: Stream) -> Ticket:
        return self.record(stream)

    def wait(self, stream: Stream, ticket: Ticket) -> Ticket | None:
        ticket.wait_on(stream)
        return None

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), POISON, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        if self.refuses:
            return None
        memory = self.empty(nbytes)
        self.segments[memory.data_ptr()] = memory
        self.sizes.append(nbytes)
        return memory

    def unpin(self, memory: torch.Tensor) -> None:
        del self.segments[memory.data_ptr()]
        memory.fill_(POISON)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream, after: Iterable[Ticket] = ()) -> Ticket:
        return self._queue(stream, list(after), lambda: dst.copy_(src))

    def workers(self, count: int, name: str) -> Workers:
        return ThreadPoolExecutor(count, thread_name_prefix=name)

    def step(self) -> bool:
        """Run one operation, of a stream chosen by chance; False when none can run."""
        with self.lock:
            able = [s for s in self.streams if s.queue and all(ticket.ready() for ticket in s.queue[0][0])]
            if able:
                self.random.choice(able).queue.popleft()[1]()
            return bool(able)

    def finish(self) -> None:
        while self.step():
            pass
        assert not any(stream.queue for stream in self.streams), "streams wait for each other for ever"

    def run_until(self, ticket: LateTicket) -> None:
        while not ticket.done:
            assert self.step() or ticket.done, "nothing runs that could be waited for"

    def _queue(self, stream: Stream, after: list[Ticket], work: Callable[[], object]) -> Ticket:
        ticket = LateTicket(self)

        def run() -> None:
            work()
            ticket.done = True

        with self.lock:
            stream.queue.append((after, run))
        return ticket
