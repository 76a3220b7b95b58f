"""Times of the modules in one step, and of the store's own work in it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from actstore.base.ledger import Account
from actstore.base.ticket import Ticket
from actstore.devices import Device

BACKWARD_END = "the end of backward"
FORWARD, BACKWARD = "forward", "backward"

Mark = tuple[Ticket, int]  # a moment, and the number of full garbage collections by then
_Time = tuple[float, bool]  # milliseconds, and whether a full garbage collection ran in them


class Moments:
    """Moments of one step.

    Where the device is the host, a full garbage collection counts for no call if further calls of the same module show
    their usual time. A collection is rare, and may take longer than hundreds of calls.

    Parameters
    ----------
    turn : called when a backward has begun
    """

    def __init__(
        self, device: Device, decisions: dict[str, str], writers: set[str], turn: Callable[[], None] = lambda: None
    ) -> None:
        self.decisions = decisions
        self._turn = turn
        self.turned = False  # backward has begun
        self._writers = writers
        self._versions: dict[str, list[list[int]]] = {}  # versions of the inputs of running calls
        self.errors: list[tuple[Account, Tensor]] = []  # rows of `accuracy.measure`
        self._works: list[tuple[Account, str, Mark, Mark]] = []  # of the store: encode, decode, recompute
        self._device = device
        self._marks: list[tuple[str, str, Mark]] = []
        self._calls: dict[str, int] = {}
        self._calls_at_turn: dict[str, int] = {}  # when the first backward began
        self._grads: dict[int, list[tuple[str, int, Mark]]] = {}  # by backward: arrivals of output gradients
        self.note("begin", "")

    def note(self, kind: str, name: str) -> None:
        self._marks.append((kind, name, self._mark()))

    def _mark(self) -> Mark:
        collections: int = gc.get_stats()[2]["collections"] if self._device.on_host else 0
        return self._device.mark(self._device.current()), collections

    def work(self, account: Account, direction: str) -> Callable[[], None]:
        """Note that work of the store begins, and return the function to call at its end."""
        begin = self._mark()
        return lambda: self._works.append((account, direction, begin, self._mark()))

    def entering(self, name: str) -> Callable[..., None]:
        def enter(_module: Module, args: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # not inside backward, where it is recomputed
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
        """Watch the model's outputs: if the model computes the loss, backward begins there."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin)

    def _begin(self, _grad: Tensor | None = None) -> None:
        self.turned = True

    def _arriving(self, name: str, call: int) -> Callable[[Tensor], None]:
        def arrive(_grad: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            moments = self._grads.get(task)
            if moments is None:
                self._begin()
                self._calls_at_turn = self._calls_at_turn or dict(self._calls)
                self._turn()
                moments = self._grads[task] = []
                engine: Any = Variable._execution_engine
                engine.queue_callback(lambda: moments.append((BACKWARD_END, 0, self._mark())))
            moments.append((name, call, self._mark()))

        return arrive

    def worked(self) -> Iterator[tuple[Account, str, float]]:
        """Yield the store's work in this step: the account, the direction, and the milliseconds."""
        times: dict[tuple[Account, str], list[_Time]] = {}
        for account, direction, begin, end in self._works:
            times.setdefault((account, direction), []).append(_between(begin, end))
        for (account, direction), of_works in times.items():
            yield account, direction, sum(_without_collections(of_works))

    @property
    def total(self) -> float:
        """Milliseconds from the first mark to the last."""
        return _between(self._marks[0][2], self._marks[-1][2])[0]

    def forward(self) -> dict[str, list[float]]:
        """Return the milliseconds of each call of each module, in the order of their first calls."""
        times: dict[str, list[_Time]] = {}
        entered: dict[str, list[Mark]] = {}
        for kind, name, mark in self._marks:
            if kind == "enter":
                times.setdefault(name, [])
                entered.setdefault(name, []).append(mark)
            elif kind == "leave" and entered.get(name):
                times[name].append(_between(entered[name].pop(), mark))
        return {name: _without_collections(of_calls) for name, of_calls in times.items()}

    def waiting(self) -> dict[str, int]:
        """Return how many calls of a module waited when the first backward began, where each call has its own backward.

        Such calls are those of micro-batches. A module that runs once, or several times before one backward, has none.
        """
        calls = [Counter(name for name, _ in {moment[:2] for moment in task}) for task in self._grads.values()]
        several = {name for task in calls for name, count in task.items() if name != BACKWARD_END and count > 1}
        names = {name for task in calls for name in task} - several
        return {name: self._calls_at_turn.get(name, 0) for name in names if self._calls.get(name, 0) > 1}

    def backward(self) -> dict[str, dict[int, float]]:
        """Return the milliseconds of each call: from the gradient of its output to the next such gradient."""
        times: dict[str, dict[int, _Time]] = {}
        for moments in self._grads.values():
            ordered = sorted(moments, key=lambda moment: begin_ns(moment[2][0]))
            for (name, call, begin), (_, _, end) in pairwise(ordered):
                of_calls = times.setdefault(name, {})
                ms, collected = _between(begin, end)
                before, earlier = of_calls.get(call, (0.0, False))
                of_calls[call] = before + ms, earlier or collected
        return {
            name: dict(zip(of_calls, _without_collections(list(of_calls.values())), strict=True))
            for name, of_calls in times.items()
        }


def _between(begin: Mark, end: Mark) -> _Time:
    return (begin_ns(end[0]) - begin_ns(begin[0])) / 1e6, begin[1] != end[1]


def _without_collections(times: Sequence[_Time]) -> list[float]:
    """Return the milliseconds, with calls that met a garbage collection limited to the median of the rest."""
    typical = median([ms for ms, collected in times if not collected] or [inf])
    return [min(ms, typical) if collected else ms for ms, collected in times]


def _versions(args: Any) -> list[int]:
    return [leaf._version for leaf in _leaves(args) if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _leaves(value: Any) -> Sequence[Any]:
    """Return `tree_leaves(value)`, with a fast path for tensors and tuples of these: RNN cells run a thousand times."""
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
