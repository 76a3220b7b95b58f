"""A simulated accelerator: streams that run as late, and in as odd an order, as events allow.

Nothing runs when it is enqueued. `step` runs the next operation of a stream chosen by chance among those that wait for
nothing, so that a missing event shows as wrong bytes under some seed. The host may not wait, except where a test says
so: `synchronize` raises.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from random import Random

import pytest
import torch

DEVICE = torch.device("cuda:0")


class OnDevice(torch.Tensor):
    """A tensor that says it lies on the accelerator."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


class Accelerator:
    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.here = threading.local()
        self.host_may_wait = False
        self.waits = 0  # of the host
        self.main = Stream(self)

    @property
    def current(self) -> Stream:
        return getattr(self.here, "stream", self.main)

    def enqueue(self, work: Callable[[], object], stream: Stream | None = None) -> None:
        with self.lock:
            (stream or self.current).queue.append(work)

    def step(self) -> bool:
        """Run one operation; False when there is none."""
        with self.lock:
            ready = [stream for stream in self.streams if stream.queue and stream.can_run()]
            if ready:
                self.random.choice(ready).queue.popleft()()
            return bool(ready)

    def some_steps(self) -> None:
        for _ in range(self.random.choice((0, 0, 1, 5, 20))):
            self.step()

    def finish(self) -> None:
        with self.lock:
            while self.step():
                pass
            assert not any(stream.queue for stream in self.streams), "streams wait for each other for ever"

    def host_wait(self, done: Callable[[], bool]) -> None:
        worker = threading.current_thread().name.startswith("actstore-disk")
        assert worker or self.host_may_wait, "the host waits for the device"
        self.waits += not worker
        while not done():
            assert self.step() or done(), "nothing runs that the host could wait for"


class Token:
    """One point of one stream, reached or not; as an operation it reaches itself."""

    def __init__(self) -> None:
        self.reached = False

    def __call__(self) -> None:
        self.reached = True


class Wait(Token):
    def __init__(self, token: Token) -> None:
        self.token = token


class Stream:
    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.queue: deque[Callable[[], object]] = deque()
        self.device = DEVICE
        self._before: Stream | None = None
        accelerator.streams.append(self)

    def can_run(self) -> bool:
        return not isinstance(self.queue[0], Wait) or self.queue[0].token.reached

    def wait_event(self, event: Event) -> None:
        if event.token is not None:
            self.accelerator.enqueue(Wait(event.token), self)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.accelerator)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.accelerator.host_wait(lambda: not self.queue)

    def __enter__(self) -> Stream:
        if self._before is not None:  # as torch 2.9 to 2.11 say it; later ones mix up the threads' streams
            raise RuntimeError("Stream's context should not be initialized.")
        self._before = self.accelerator.current
        self.accelerator.here.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        self.accelerator.here.stream, self._before = self._before, None


class Event:
    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.token: Token | None = None

    def record(self, stream: Stream) -> None:
        self.token = Token()
        self.accelerator.enqueue(self.token, stream)

    def query(self) -> bool:
        return self.token is None or self.token.reached

    def synchronize(self) -> None:
        self.accelerator.host_wait(self.query)


def simulate(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> Accelerator:
    """Replace torch's streams, events, copies and pinned memory by simulated ones."""
    accelerator = Accelerator(seed)
    copy, empty = torch.Tensor.copy_, torch.empty

    def later(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        plain = dst.as_subclass(torch.Tensor)
        accelerator.enqueue(lambda: copy(plain, src.as_subclass(torch.Tensor)))
        if not non_blocking:
            accelerator.current.synchronize()
        return dst

    def unpinned(*size: int, pin_memory: bool = False, device: object = None, **options: object) -> torch.Tensor:
        return on_device(empty(*size, **options)) if device == DEVICE else empty(*size, **options)

    monkeypatch.setattr(torch, "Stream", lambda device: Stream(accelerator))
    monkeypatch.setattr(torch, "Event", lambda device: Event(accelerator))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: accelerator.current)
    monkeypatch.setattr(torch.Tensor, "copy_", later)
    monkeypatch.setattr(torch, "empty", unpinned)
    return accelerator
