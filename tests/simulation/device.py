"""A device whose streams and workers run at any legal moment, and whose memory tells what nothing has ordered."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import finalize

import torch

from actstore.base.ticket import Span, Ticket
from actstore.devices.base import Device, Workers
from tests.simulation.agents import Host, Op, Stream
from tests.simulation.clocks import Checker, join
from tests.simulation.heap import POISON, Block, Heap
from tests.simulation.scheduler import Pool, Scheduler

T = TypeVar("T")


class SimTicket(Ticket):
    """A point of a stream."""

    on_stream = True

    def __init__(self, device: SimDevice, op: Op, span: Span | None = None) -> None:
        self._device = device
        self._op = op
        self._span = span

    def ready(self) -> bool:
        self._device.enter()
        return self._device.scheduler.knows(self._op)

    def wait_on(self, stream: Any) -> None:
        if stream is None:
            self.result()
        else:
            self._device.enter()
            self._device.order(stream, self._op)

    def result(self) -> None:
        self._device.enter()
        self._device.scheduler.wait_for(self._op, f"{self._op.stream.name}")

    def span(self) -> Span | None:
        return self._span if self._device.scheduler.knows(self._op) else None


class SimWorkers(Workers):
    def __init__(self, device: SimDevice, pool: Pool) -> None:
        self._device = device
        self._pool = pool
        self._futures: list[Future[Any]] = []
        self._closed = False

    def submit(self, job: Callable[..., T], /, *args: Any) -> Future[T]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self._device.enter()
        self._futures = [future for future in self._futures if future.running() or not Future.done(future)]
        future = self._device.scheduler.submit(self._pool, partial(job, *args))
        self._futures.append(future)
        return future

    def shutdown(self) -> None:
        self._closed = True
        for future in self._futures:
            future.exception()


@dataclass
class Link:
    """What bytes go through, one copy at a time; infinitely fast where `gbps` is None."""

    gbps: float | None = None
    latency_ns: int = 0
    idle_ns: int = 0  # when it has done what is planned

    def take(self, ready_ns: int, nbytes: int) -> Span:
        """When a copy that could begin at `ready_ns` begins and ends."""
        begin = max(ready_ns, self.idle_ns)
        self.idle_ns = begin + self.latency_ns + (int(nbytes / self.gbps) if self.gbps else 0)
        return begin, self.idle_ns


class SimDevice(Device):
    """A device of ordinary CPU tensors; compute streams run eagerly, all other work as late and in as odd an order as
    `seed` and events allow.

    Parameters
    ----------
    seed : of all choices
    timed : no chance: copies take the time of their links, and are complete when the host's virtual time says so
    lead_ns : how far the host runs ahead of what it computes, in virtual time

    Attributes
    ----------
    links : "out" and "in" are the device's, "disk" is the files'
    refuse_pinned : whether `pinned` returns None
    free_nbytes : device memory that no step has needed
    scheduler, checker, heap : the parts
    """

    on_host = False
    torch_device = torch.device("cpu")

    def __init__(self, seed: int = 0, *, timed: bool = False, lead_ns: int = 0) -> None:
        self.scheduler = Scheduler(seed, timed)
        self.checker = Checker()
        self._freed: deque[tuple[Block | _Foreign, Host]] = deque()
        self.heap = Heap(lambda block: self._freed.append((block, self.scheduler.here)))
        self.lead_ns = lead_ns
        self.links = {"out": Link(), "in": Link(), "disk": Link()}
        self.refuse_pinned = False
        self.free_nbytes = 0
        self._foreign: dict[int, _Foreign] = {}  # memory of the user's tensors, by address

    # -- the interface ------------------------------------------------------------------------------------------------

    def current(self) -> Stream:
        return self.scheduler.here.stream

    def stream(self) -> Stream:
        return self.scheduler.new_stream(f"side stream {len(self.scheduler.streams)}", eager=False)

    def record(self, stream: Any) -> Ticket:
        self.enter()
        return SimTicket(self, self._queue(stream))

    def mark(self, stream: Any) -> Ticket:
        self.enter()
        op = self._queue(stream)
        return SimTicket(self, op, (op.end_ns, op.end_ns))

    def wait(self, stream: Any, ticket: Ticket) -> Ticket | None:
        self.enter()
        begin = max(stream.now_ns, self.scheduler.here.now_ns)
        ticket.wait_on(stream)
        end = max(stream.now_ns, self.scheduler.here.now_ns)
        return SimTicket(self, self._queue(stream), (begin, end)) if self.timing and begin < end else None

    def empty(self, nbytes: int) -> torch.Tensor:
        self.enter()
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        stream = self.current()
        memory = self.heap.device(nbytes, stream)
        base = memory.data_ptr()
        op = self._queue(stream)
        what = f"what had the memory before, on {stream.name}"
        self.checker.access(base, base, base + nbytes, True, stream.id, op.clock, what)
        return memory

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        self.enter()
        return None if self.refuse_pinned else self.heap.pinned(nbytes)

    def unpin(self, memory: torch.Tensor) -> None:
        self.enter()
        block = self.heap.blocks[memory.untyped_storage().data_ptr()]
        written = block.lo, block.hi
        self._host_access(block, block.base, block.base + block.nbytes, True, "unpin")
        block.lo, block.hi = written  # it only stands for whoever gets the memory next
        self.heap.unpin(block)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any, after: Iterable[Ticket] = ()) -> Ticket:
        self.enter()
        assert dst.nbytes == src.nbytes, f"a copy of {src.nbytes} bytes to {dst.nbytes}"
        assert dst.is_contiguous()
        assert src.is_contiguous()
        for ticket in after:
            ticket.wait_on(stream)
        op = self._queue(
            stream,
            f"a copy of {src.nbytes} bytes",
            reads=[src],
            writes=[dst],
            run=self._moves(dst, src, self.current()),
            link=self._link(dst, src, stream),
        )
        return SimTicket(self, op, (op.begin_ns, op.end_ns) if self.timing else None)

    def spare_nbytes(self) -> int:
        return self.free_nbytes

    def workers(self, count: int, name: str) -> Workers:
        return SimWorkers(self, self.scheduler.pool(name, count))

    @contextmanager
    def on(self, stream: Any) -> Iterator[Stream]:
        """Compute on another stream. As with torch, nothing orders it after the one before."""
        here = self.scheduler.here
        before, here.stream = here.stream, stream
        try:
            yield stream
        finally:
            here.stream = before

    # -- for programs -------------------------------------------------------------------------------------------------

    def compute_stream(self) -> Stream:
        """A stream of the user's, for `on`."""
        return self.scheduler.new_stream(f"compute stream {len(self.scheduler.streams)}", eager=True)

    def compute(
        self,
        ns: int = 0,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        what: str = "compute",
    ) -> None:
        """Say what the current stream does now; the caller does it to the tensors at once."""
        self.enter()
        stream = self.current()
        self._queue(stream, what, reads, writes, ns=ns)
        here = self.scheduler.here
        here.now_ns = max(here.now_ns, stream.now_ns - self.lead_ns)

    def host(self, memory: torch.Tensor, write: bool, what: str) -> None:
        """Say that the calling host thread or job reads or writes memory now."""
        self._settle()
        self._host_access(self._owner(memory, self.current()), *_extent(memory), write, what)

    def host_bytes(self, address: int, nbytes: int, write: bool, what: str) -> None:
        """`host` by address; nothing where that is no memory of this device."""
        self._settle()
        block = self.heap.find(address)
        if block is not None:
            self._host_access(block, address, address + nbytes, write, what)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        block = self.heap.blocks.get(tensor.untyped_storage().data_ptr())
        return block is not None and block.pinned

    @property
    def held_nbytes(self) -> tuple[int, int]:
        """Bytes of device memory and of pinned memory that somebody holds."""
        self._settle()
        return self.heap.device_nbytes, self.heap.pinned_nbytes

    def finish(self) -> None:
        """Run all that is left."""
        self._settle()
        self.scheduler.finish()

    def check(self) -> None:
        """Fail if there was a race, or somebody waited who may not."""
        self._settle()
        wrong = [*self.scheduler.failures, *map(str, self.checker.races)]
        assert not wrong, "\n".join(wrong)

    def close(self) -> None:
        """Unwind what still runs, and return memory to the next simulation."""
        self.scheduler.kill()
        self.heap.close()

    def enter(self) -> None:
        self._settle()
        self.scheduler.enter()

    # -- operations ---------------------------------------------------------------------------------------------------

    def order(self, stream: Stream, op: Op) -> None:
        """Let a stream wait for an operation."""
        join(stream.clock, op.clock)
        stream.now_ns = max(stream.now_ns, op.end_ns)
        if stream.eager:
            self.scheduler.force(op)
        else:
            stream.after += (op,)

    def _queue(
        self,
        stream: Stream,
        what: str = "an event",
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        run: Callable[[], None] | None = None,
        link: tuple[Link, int] | None = None,
        ns: int = 0,
    ) -> Op:
        begin, end = self._stamp(stream, self.scheduler.here, link, ns)
        if reads or writes:
            what = f"{what} on {stream.name}"
            for tensor in reads:
                self._access(stream, tensor, False, what)
            for tensor in writes:
                self._access(stream, tensor, True, what)
        op = Op(stream, run, begin, end)
        stream.queue.append(op)
        if stream.eager and run is not None:
            op.run = None
            run()
        return op

    def _stamp(self, stream: Stream, here: Host, link: tuple[Link, int] | None = None, ns: int = 0) -> Span:
        """Give the next operation of a stream its time: it comes after all that who enqueues it knows."""
        join(stream.clock, here.clock)
        stream.clock[stream.id] += 1
        begin = max(stream.now_ns, here.now_ns)
        if link is not None:
            begin, end = link[0].take(begin, link[1])
        else:
            end = begin + ns
        stream.now_ns = end
        return begin, end

    def _access(self, stream: Stream, tensor: torch.Tensor, write: bool, what: str) -> None:
        if not tensor.numel():
            return
        owner = self._owner(tensor, stream)
        lo, hi = _extent(tensor)
        if write and isinstance(owner, Block):
            owner.lo, owner.hi = min(owner.lo, lo), max(owner.hi, hi)
        self._live(owner, what)
        self.checker.access(owner.base, lo, hi, write, stream.id, stream.clock, what)

    def _host_access(self, owner: Block | _Foreign, lo: int, hi: int, write: bool, what: str) -> None:
        here = self.scheduler.here
        here.clock[here.id] += 1
        what = f"{what} of {here.name}"
        if write and isinstance(owner, Block):
            owner.lo, owner.hi = min(owner.lo, lo), max(owner.hi, hi)
        self._live(owner, what)
        self.checker.access(owner.base, lo, hi, write, here.id, here.clock, what)

    def _live(self, owner: Block | _Foreign, what: str) -> None:
        if owner.gone:
            self.scheduler.failures.append(f"{what} uses memory that was returned")

    def _owner(self, tensor: torch.Tensor, stream: Stream) -> Block | _Foreign:
        """The allocation under a tensor.

        One of the user's is watched from now on: when it dies, the next work of its stream gets it, as from a device's
        allocator.
        """
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        owner = self.heap.blocks.get(base) or self._foreign.get(base)
        if owner is None:
            owner = self._foreign[base] = _Foreign(base, storage.nbytes(), stream)
            finalize(storage, self._died, owner).atexit = False
        return owner

    def _died(self, foreign: _Foreign) -> None:
        foreign.gone = True
        self._freed.append((foreign, self.scheduler.here))

    def _settle(self) -> None:
        """Do what finalizers could only note: who frees memory lets its stream write there at once."""
        while self._freed:
            block, here = self._freed.popleft()
            stream = block.stream
            assert stream is not None
            self._stamp(stream, here)
            stream.queue.append(Op(stream, None, stream.now_ns, stream.now_ns))
            what = f"the next use, after its last reference was gone, on {stream.name}"
            self.checker.access(block.base, block.base, block.base + block.nbytes, True, stream.id, stream.clock, what)
            if isinstance(block, Block):
                self.heap.release(block)
            else:
                self._foreign.pop(block.base, None)
                self.checker.forget(block.base)

    def _link(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> tuple[Link, int] | None:
        """The link that a copy goes through; none within the device."""
        if stream.eager:
            return None
        to, of = (self.heap.blocks.get(each.untyped_storage().data_ptr()) for each in (dst, src))
        if (to is not None and to.pinned) or (of is not None and not of.pinned and to is None):
            return self.links["out"], src.nbytes
        if (of is not None and of.pinned) or (to is not None and not to.pinned and of is None):
            return self.links["in"], src.nbytes
        return None

    def _moves(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> Callable[[], None]:
        """The copy itself, which keeps neither side alive: what is gone by then is neither read nor written."""
        to, of, nbytes = dst.data_ptr(), src.data_ptr(), src.nbytes
        to_whom, of_whom = self._owner(dst, stream), self._owner(src, stream)

        def move() -> None:
            if to_whom.gone:
                return
            if of_whom.gone:
                ctypes.memset(to, POISON, nbytes)
            else:
                ctypes.memmove(to, of, nbytes)

        return move


class _Foreign:
    """Memory of the user's: not of this heap, and gone when its last tensor is."""

    __slots__ = ("base", "gone", "nbytes", "stream")

    def __init__(self, base: int, nbytes: int, stream: Stream) -> None:
        self.base = base
        self.nbytes = nbytes
        self.stream = stream
        self.gone = False


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses where the first byte of a tensor lies and where its last one ends."""
    lo = tensor.data_ptr()
    if tensor.is_contiguous():
        return lo, lo + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return lo, lo + (last + 1) * tensor.itemsize
