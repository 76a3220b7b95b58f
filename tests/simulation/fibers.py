"""Threads of which one runs at a time, and only while it is told to."""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections.abc import Callable


class Killed(BaseException):
    """The simulation is over: what waits is unwound."""


_idle: list[Fiber] = []


class Fiber:
    """A thread that runs a function while somebody is in `resume`; the function pauses by `pause`."""

    def __init__(self) -> None:
        self._go, self._back = allocate_lock(), allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._target: Callable[[], None] | None = None
        self._killed = False
        threading.Thread(target=self._loop, name="simulated", daemon=True).start()

    @staticmethod
    def start(target: Callable[[], None]) -> Fiber:
        """A fiber that will begin `target` at the first `resume`. A thread that has ended one begins another."""
        fiber = _idle.pop() if _idle else Fiber()
        fiber._target, fiber._killed = target, False
        return fiber

    @property
    def ended(self) -> bool:
        return self._target is None

    def resume(self) -> None:
        """Let it run up to its next pause."""
        self._go.release()
        self._back.acquire()

    def pause(self) -> None:
        """Called by the fiber's own function: give control back until the next `resume`."""
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise Killed

    def kill(self) -> None:
        """Unwind it; each of its pauses from now on raises Killed."""
        self._killed = True
        while not self.ended:
            self.resume()

    def _loop(self) -> None:
        while True:
            self._go.acquire()
            if self._target is not None and not self._killed:
                self._target()
            self._target = None
            _idle.append(self)
            self._back.release()
