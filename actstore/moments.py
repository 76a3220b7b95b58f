"""When the modules of one step ran, and what the store itself took meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from actstore.devices import Device
from actstore.ledger import Account
from actstore.reaper import Last
from actstore.ticket import Ticket

END = "the end of backward"
FORWARD, BACKWARD = "forward", "backward"


class Moments:
    """The moments of one step.

    Where the device is the host, a full collection of Python's garbage counts for no unit: it comes once in a while, in
    whichever runs then, and may take longer than all that a unit does.
    """

    def __init__(self, device: Device, decisions: dict[str, str], turn: Callable[[], None], writers: set[str]) -> None:
        self.decisions = decisions
        self.turned = False  # backward has begun
        self._turn = turn
        self._writers = writers
        self._versions: dict[str, list[list[int]]] = {}  # of the inputs of calls that run
        self.errors: list[tuple[Account, Tensor]] = []  # rows of `accuracy.measure`
        self._works: list[tuple[Account, str, Ticket, Ticket]] = []  # of the store: encoding, decoding, recomputation
        self._device = device
        self._marks: list[tuple[str, str, Ticket]] = []
        self._calls: dict[str, int] = {}
        self._grads: dict[int, list[tuple[str, int, Ticket]]] = {}  # by backward: whose output's gradient came when
        self._pauses: list[tuple[int, int]] = []  # when full collections began and ended
        self._paused: int | None = None
        if device.on_host:
            watch = _watching(ref(self))
            gc.callbacks.append(watch)
            self._last = Last(gc.callbacks.remove, watch)
        self.note("begin", "")

    def note(self, kind: str, name: str) -> None:
        self._marks.append((kind, name, self._mark()))

    def _mark(self) -> Ticket:
        return self._device.mark(self._device.current())

    def work(self, account: Account, direction: str) -> Callable[[], None]:
        """Some work of the store begins; what this returns is called at its end."""
        begin = self._mark()
        return lambda: self._works.append((account, direction, begin, self._mark()))

    def entering(self, name: str) -> Callable[..., None]:
        def enter(_module: Module, args: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # otherwise it is recomputed
                self._versions.setdefault(name, []).append(_versions(args))
                self.note("enter", name)

        return enter

    def leaving(self, name: str) -> Callable[..., None]:
        def leave(_module: Module, args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return
            self.note("leave", name)
            entered = self._versions.get(name)
            if entered and entered.pop() != _versions(args):
                self._writers.add(name)
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            for tensor in _leaves(output):
                if isinstance(tensor, Tensor) and not tensor.is_leaf:
                    tensor.register_hook(self._arriving(name, call))

        return leave

    def ending(self, _module: Module, _args: Any, output: Any) -> None:
        """The model has run; if it computes the loss, backward begins at its output."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin)

    def _begin(self, _grad: Tensor | None = None) -> None:
        if not self.turned:
            self.turned = True
            self._turn()

    def _arriving(self, name: str, call: int) -> Callable[[Tensor], None]:
        def arrive(_grad: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            moments = self._grads.get(task)
            if moments is None:
                self._begin()
                moments = self._grads[task] = []
                engine: Any = Variable._execution_engine
                engine.queue_callback(lambda: moments.append((END, 0, self._mark())))
            moments.append((name, call, self._mark()))

        return arrive

    def pause(self, phase: str) -> None:
        """A full collection starts or stops."""
        now = begin_ns(self._mark())
        if phase == "start":
            self._paused = now
        elif self._paused is not None:  # else it began before this step
            self._pauses.append((self._paused, now))

    def _ms(self, begin: int, end: int) -> float:
        """Milliseconds from one moment to another one, without collections."""
        paused = sum(last - first for first, last in self._pauses if begin <= first and last <= end)
        return (end - begin - paused) / 1e6

    def worked(self) -> Iterator[tuple[Account, str, float]]:
        """What the store did in this step: for whom, in which direction, and its milliseconds."""
        for account, direction, begin, end in self._works:
            yield account, direction, self._ms(begin_ns(begin), begin_ns(end))

    @property
    def total(self) -> float:
        """Milliseconds from the first mark to the last."""
        return (begin_ns(self._marks[-1][2]) - begin_ns(self._marks[0][2])) / 1e6

    def forward(self) -> dict[str, list[float]]:
        """Milliseconds of each call of each module, in the order of their first calls."""
        times: dict[str, list[float]] = {}
        entered: dict[str, list[int]] = {}
        for kind, name, ticket in self._marks:
            if kind == "enter":
                times.setdefault(name, [])
                entered.setdefault(name, []).append(begin_ns(ticket))
            elif kind == "leave" and entered.get(name):
                times[name].append(self._ms(entered[name].pop(), begin_ns(ticket)))
        return times

    def backward(self) -> dict[str, dict[int, float]]:
        """Milliseconds from the moment when the gradient of a call's output is there to the next such moment."""
        times: dict[str, dict[int, float]] = {}
        for moments in self._grads.values():
            ordered = sorted((begin_ns(ticket), name, call) for name, call, ticket in moments)
            for (begin, name, call), (end, _, _) in pairwise(ordered):
                of_calls = times.setdefault(name, {})
                of_calls[call] = of_calls.get(call, 0.0) + self._ms(begin, end)
        return times


def _watching(weak: ref[Moments]) -> Callable[[str, dict[str, int]], None]:
    """A callback of Python's collector that holds nothing of a step."""

    def watch(phase: str, info: dict[str, int]) -> None:
        moments = weak()
        if moments is not None and info["generation"] == 2:
            moments.pause(phase)

    return watch


def _versions(args: Any) -> list[int]:
    return [leaf._version for leaf in _leaves(args) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _leaves(value: Any) -> Sequence[Any]:
    """`tree_leaves`, at once for a tensor or a tuple of tensors: recurrent cells are called a thousand times."""
    if isinstance(value, Tensor):
        return (value,)
    if type(value) is tuple and all(isinstance(leaf, Tensor) for leaf in value):
        return value
    return tree_leaves(value)


def begin_ns(ticket: Ticket) -> int:
    ticket.result()
    span = ticket.span()
    assert span is not None
    return span[0]
