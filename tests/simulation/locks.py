"""Locks of simulated threads: who waits lets others run, and who gets one knows what its last owner knew."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from tests.simulation.agents import Host
from tests.simulation.clocks import Clock, join
from tests.simulation.scheduler import Scheduler

T = TypeVar("T")


class SimLock:
    """`threading.Lock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Host | None = None
        self._last: Host | None = None
        self._clock: Clock = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        if blocking and scheduler.in_fiber:
            scheduler.enter()
        here = scheduler.here
        if self._owner is not None:
            if not blocking:
                return False
            if self._owner is here:
                scheduler.fail(f"deadlock: {here.name} waits for a lock that it holds itself")
            scheduler.block(lambda: self._owner is None, "a lock", asks_device=False)
        self._owner = here
        if self._last is not here:
            join(here.clock, self._clock)
        return True

    def release(self) -> None:
        owner = self._owner
        if owner is None:
            raise RuntimeError("release unlocked lock")
        self._clock = dict(owner.clock)
        self._last, self._owner = owner, None

    def locked(self) -> bool:
        return self._owner is not None

    def owned(self) -> bool:
        return self._owner is self._scheduler.here

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimRLock(SimLock):
    """`threading.RLock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self.owned() and not super().acquire(blocking, timeout):
            return False
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            super().release()


class SimCondition:
    """`threading.Condition`. Who waits is a host that waits for the device, as only jobs should."""

    def __init__(self, scheduler: Scheduler, lock: SimLock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or SimRLock(scheduler)
        self._waiting: list[list[bool]] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def wait(self, timeout: float | None = None) -> bool:
        told = [False]
        self._waiting.append(told)
        self._lock.release()
        try:
            self._scheduler.block(lambda: told[0], "a condition")
        finally:
            self._lock.acquire()
        return True

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        while not (result := predicate()):
            self.wait()
        return result

    def notify(self, n: int = 1) -> None:
        for told in self._waiting[:n]:
            told[0] = True
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class SimEvent:
    """`threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._condition = SimCondition(scheduler)
        self._set = False

    def is_set(self) -> bool:
        with self._condition:
            return self._set

    def set(self) -> None:
        with self._condition:
            self._set = True
            self._condition.notify_all()

    def clear(self) -> None:
        with self._condition:
            self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._set)


class SimSemaphore:
    """`threading.Semaphore`."""

    def __init__(self, scheduler: Scheduler, value: int = 1) -> None:
        self._condition = SimCondition(scheduler)
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._condition:
            if not blocking and not self._value:
                return False
            self._condition.wait_for(lambda: self._value)
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        with self._condition:
            self._value += n
            self._condition.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimDeque(deque[Any]):
    """A deque through which threads hand things to each other: who takes knows what all who put knew."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._clock: Clock = {}

    def append(self, item: Any) -> None:
        join(self._clock, self._scheduler.here.clock)
        super().append(item)

    def popleft(self) -> Any:
        join(self._scheduler.here.clock, self._clock)
        return super().popleft()
