"""Who acts in a simulation: streams, host threads and the jobs of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count

from tests.simulation.clocks import Clock


class Agent:
    """One that does one thing after another.

    Attributes
    ----------
    id : its place in clocks, in order of creation
    clock : what it has done and what it knows of others
    now_ns : virtual time up to which its work is planned
    """

    __slots__ = ("clock", "id", "name", "now_ns")

    def __init__(self, ids: count[int], name: str) -> None:
        self.id = next(ids)
        self.name = name
        self.clock: Clock = {self.id: 0}
        self.now_ns = 0


class Op:
    """An operation on a stream. It refers to no tensor: a queued copy keeps no memory alive."""

    __slots__ = ("after", "begin_ns", "clock", "done", "end_ns", "run", "stream")

    def __init__(self, stream: Stream, run: Callable[[], None] | None, begin_ns: int, end_ns: int) -> None:
        self.stream = stream
        self.run = run
        self.after, stream.after = stream.after, ()
        self.clock = dict(stream.clock)
        self.begin_ns = begin_ns
        self.end_ns = end_ns
        self.done = False


class Stream(Agent):
    """Operations in order. Those of a compute stream (`eager`) have taken effect when they are queued.

    On such a stream the queue only says how much of it the host may know to be done.
    """

    __slots__ = ("after", "eager", "queue")

    def __init__(self, ids: count[int], name: str, eager: bool) -> None:
        super().__init__(ids, name)
        self.eager = eager
        self.queue: deque[Op] = deque()
        self.after: tuple[Op, ...] = ()  # what the next operation waits for

    def can_run(self) -> bool:
        return bool(self.queue) and all(op.done for op in self.queue[0].after)

    def run_first(self) -> None:
        op = self.queue.popleft()
        op.done = True  # first: what runs may look
        run, op.run, op.after = op.run, None, ()
        if run is not None:
            run()


class Host(Agent):
    """A host thread, or the job of a worker.

    Attributes
    ----------
    stream : where it computes now
    may_wait : whether it may wait for the device at any time, as workers may
    """

    __slots__ = ("may_wait", "stream")

    def __init__(self, ids: count[int], name: str, stream: Stream, may_wait: bool) -> None:
        super().__init__(ids, name)
        self.stream = stream
        self.may_wait = may_wait
