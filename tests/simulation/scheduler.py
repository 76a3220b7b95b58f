"""Chooses what runs next, of streams, workers and threads: by chance, or in the order of virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from random import Random
from typing import Any, NoReturn, TypeVar

from tests.simulation.agents import Host, Op, Stream
from tests.simulation.clocks import Clock, join
from tests.simulation.fibers import Fiber

T = TypeVar("T")

# How many things run before a call to the device takes effect: one of these, by the seed. Where streams hardly run on
# their own, most work is still to be done when the host has come to the end.
PACES = ((0, 0, 0, 1, 1, 2, 4, 8), (0, 0, 0, 0, 0, 0, 0, 0, 1, 2), (0,) * 60 + (1,))


class SimFuture(Future[T]):
    """The result of a job. Who asks lets others run; who learns that it is done knows what the job knew."""

    def __init__(self, scheduler: Scheduler, worker: bool) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._worker = worker
        self.clock: Clock = {}
        self.end_ns = 0

    def done(self) -> bool:
        self._scheduler.enter()
        return self._known()

    def result(self, timeout: float | None = None) -> T:
        self._wait()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait()
        return super().exception(0)

    def _known(self) -> bool:
        scheduler = self._scheduler
        if not super().done() or (scheduler.timed and self.end_ns > scheduler.here.now_ns):
            return False
        join(scheduler.here.clock, self.clock)
        return True

    def _wait(self) -> None:
        scheduler = self._scheduler
        if self._known():
            return
        scheduler.block(super().done, "a job" if self._worker else "a thread", asks_device=self._worker)
        scheduler.here.now_ns = max(scheduler.here.now_ns, self.end_ns)
        join(scheduler.here.clock, self.clock)


class Task:
    """A job or a thread that has begun."""

    def __init__(
        self, host: Host, future: SimFuture[Any], job: Callable[[], Any], ended: Callable[[Task], None]
    ) -> None:
        self.host = host
        self.future = future
        self.blocked: Callable[[], bool] | None = None  # true when it can go on
        self.what = ""
        self.fiber = Fiber.start(self._run)
        self._job = job
        self._ended = ended

    def _run(self) -> None:
        try:
            outcome = self._job()
        except BaseException as error:
            self._finish()
            self.future.set_exception(error)
        else:
            self._finish()
            self.future.set_result(outcome)

    def can_run(self) -> bool:
        return self.blocked is None or self.blocked()

    def _finish(self) -> None:
        self.future.clock, self.future.end_ns = dict(self.host.clock), self.host.now_ns
        self._ended(self)


class Pool:
    """`count` threads that take jobs in the order of their submission."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.jobs: deque[tuple[SimFuture[Any], Callable[[], Any], Clock, int]] = deque()
        self.running = 0
        self.begun = 0
        self.idle_ns = [0] * size  # when its threads have ended what they did
        self.last: Clock = {}

    def begin_ns(self) -> int:
        return max(self.jobs[0][3], min(self.idle_ns, default=0))


class Scheduler:
    """Runs everything on one thread at a time.

    The main thread schedules. Other threads, and jobs, run in fibers: until they pause, by chance or because they wait.

    Parameters
    ----------
    seed : of all choices
    timed : nothing is left to chance: what has happened at the caller's virtual time has happened, and nothing else

    Attributes
    ----------
    here : the host thread or job that runs now
    host_may_wait : whether a thread may wait for the device or a job
    waits : how often one did
    failures : what went wrong where nobody could be told
    """

    def __init__(self, seed: int, timed: bool = False) -> None:
        self.random = Random(seed)
        self.timed = timed
        self._pace = self.random.choice(PACES)
        self.host_may_wait = False
        self.waits = 0
        self.failures: list[str] = []
        self.streams: list[Stream] = []
        self.ids = count()
        self.main_stream = self.new_stream("the compute stream", eager=True)
        self.main = self.here = Host(self.ids, "the main thread", self.main_stream, may_wait=False)
        self._tasks: list[Task] = []
        self._task: Task | None = None  # the fiber that runs
        self._pools: list[Pool] = []

    # -- who acts -----------------------------------------------------------------------------------------------------

    def new_stream(self, name: str, eager: bool) -> Stream:
        stream = Stream(self.ids, name, eager)
        self.streams.append(stream)
        return stream

    def pool(self, name: str, size: int) -> Pool:
        pool = Pool(name, size)
        self._pools.append(pool)
        return pool

    def submit(self, pool: Pool, job: Callable[[], T]) -> SimFuture[T]:
        self.enter()
        future: SimFuture[T] = SimFuture(self, worker=True)
        pool.jobs.append((future, job, dict(self.here.clock), self.here.now_ns))
        return future

    def spawn(
        self, job: Callable[..., T], *args: Any, name: str = "a thread", stream: Stream | None = None
    ) -> SimFuture[T]:
        """Run a function as a host thread of its own, computing on `stream`, beside the caller."""
        host = Host(self.ids, name, stream or self.here.stream, may_wait=False)
        join(host.clock, self.here.clock)
        host.now_ns = self.here.now_ns
        future: SimFuture[T] = SimFuture(self, worker=False)
        future.set_running_or_notify_cancel()
        self._tasks.append(Task(host, future, lambda: job(*args), self._tasks.remove))
        return future

    @property
    def in_fiber(self) -> bool:
        return self._task is not None

    # -- time passes --------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """A moment at which others may run; each call to the device is one."""
        if self._task is not None:
            if self.timed or self.random.random() < 0.25:
                self._pause()
        else:
            pace = self._pace
            for _ in range(pace[int(self.random.random() * len(pace))] if not self.timed else 1 << 30):
                if not self.step(self.here.now_ns):
                    break

    def step(self, until_ns: int | None = None) -> bool:
        """Run one thing, up to a virtual time where that counts; False when nothing can run."""
        able: list[Stream | Task | Pool] = [stream for stream in self.streams if stream.queue and stream.can_run()]
        if self._tasks:
            able += [task for task in self._tasks if task.can_run()]
        if self._pools:
            able += [pool for pool in self._pools if pool.jobs and pool.running < pool.size]
        if self.timed:
            able = self._first(able, until_ns)
        if not able:
            return False
        chosen = able[int(self.random.random() * len(able))]
        if isinstance(chosen, Stream):
            chosen.run_first()
            while chosen.eager and chosen.queue and not self.timed and self.random.random() < 0.7:
                chosen.run_first()
        elif isinstance(chosen, Task):
            self._resume(chosen)
        else:
            self._begin(chosen)
        return True

    def force(self, op: Op) -> None:
        """Run what an operation needs, and it."""
        stack = [op]
        while stack:
            if stack[-1].done:
                stack.pop()
                continue
            stream = stack[-1].stream
            waits_for = next((other for other in stream.queue[0].after if not other.done), None)
            if waits_for is None:
                stream.run_first()
            else:
                stack.append(waits_for)

    def block(self, done: Callable[[], bool], what: str, asks_device: bool = True) -> None:
        """Make the caller wait."""
        if asks_device:
            self._allow(what)
        task = self._task
        if task is not None:
            while not done():
                task.blocked, task.what = done, what
                self._pause()
            return
        while not done():
            if not self.step():
                self.fail(f"deadlock: {self.here.name} waits for {what}{self._stuck()}")

    def wait_for(self, op: Op, what: str) -> None:
        """Make the calling host thread wait for an operation."""
        if not self.knows(op):
            self._allow(what)
            if self._task is not None and not self.timed and self.random.random() < 0.5:
                self.block(lambda: op.done, what, asks_device=False)
            else:
                self.enter()
                self.force(op)
        join(self.here.clock, op.clock)
        self.here.now_ns = max(self.here.now_ns, op.end_ns)

    def knows(self, op: Op) -> bool:
        """Whether the calling host thread, when it asks, learns that an operation is complete."""
        if self.timed and op.end_ns <= self.here.now_ns:
            self.force(op)
        elif self.timed or not op.done:
            return False
        join(self.here.clock, op.clock)
        return True

    def finish(self) -> None:
        """Run all that is left. Fails where somebody waits for ever."""
        while self.step():
            pass
        if self._tasks:
            self.fail(f"deadlock: nothing can run{self._stuck()}")
        for stream in self.streams:
            self.main.now_ns = max(self.main.now_ns, stream.now_ns)

    def kill(self) -> None:
        """Unwind what has not ended."""
        for task in self._tasks[:]:
            self._task, self.here = task, task.host
            task.fiber.kill()
        self._tasks.clear()
        self._task, self.here = None, self.main

    # -- tasks --------------------------------------------------------------------------------------------------------

    def _begin(self, pool: Pool) -> None:
        begin_ns = pool.begin_ns()
        future, job, clock, _ = pool.jobs.popleft()
        if not future.set_running_or_notify_cancel():
            return
        pool.begun += 1
        pool.running += 1
        pool.idle_ns.remove(min(pool.idle_ns))
        host = Host(self.ids, f"job {pool.begun} of {pool.name}", self.main_stream, may_wait=True)
        host.now_ns = begin_ns
        join(host.clock, clock)
        if pool.size == 1:
            join(host.clock, pool.last)

        def ended(task: Task) -> None:
            pool.running -= 1
            pool.idle_ns.append(host.now_ns)
            pool.last = dict(host.clock)
            self._tasks.remove(task)

        self._tasks.append(Task(host, future, job, ended))

    def _resume(self, task: Task) -> None:
        task.blocked = None
        before, self._task, self.here = self.here, task, task.host
        try:
            task.fiber.resume()
        finally:
            self._task, self.here = None, before

    def _pause(self) -> None:
        assert self._task is not None
        self._task.fiber.pause()

    def _first(self, able: list[Stream | Task | Pool], until_ns: int | None) -> list[Stream | Task | Pool]:
        """What comes first in virtual time."""

        def when(one: Stream | Task | Pool) -> int:
            if isinstance(one, Stream):
                return one.queue[0].end_ns
            return one.host.now_ns if isinstance(one, Task) else one.begin_ns()

        first = min(able, key=when, default=None)
        return [] if first is None or (until_ns is not None and when(first) > until_ns) else [first]

    def _allow(self, what: str) -> None:
        if not self.here.may_wait:
            self.waits += 1
            if not self.host_may_wait:
                self.fail(f"the host waits for the device: {self.here.name} for {what}")

    def _stuck(self) -> str:
        return "".join(f"; {task.host.name} for {task.what or 'its turn'}" for task in self._tasks)

    def fail(self, text: str) -> NoReturn:
        """Raise, and remember for `finish`, since who called may be a job or a finalizer."""
        self.failures.append(text)
        raise AssertionError(text)
