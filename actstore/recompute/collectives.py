"""Collectives and messages inside of recomputed regions that a rule for `@collective` names: no later run communicates.

Functional ones (`_c10d_functional`) return tensors, as other operators do. Those of `torch.distributed` (`c10d`) write
to their arguments: a later run gets copies of what they wrote. Some come later than they begin: the region goes on
meanwhile, as without the rule. What has come is stored before the first operator that reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import dropwhile, takewhile
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from actstore.base.storage import storages_of
from actstore.errors import StateError
from actstore.recompute.decision_modes import shape_of
from actstore.recompute.inner_rules import COMMUNICATION, is_collective, written_by, written_values
from actstore.recompute.outputs import is_plain

# Their collectives move weights, on streams of their own and for modules that run later.
_WEIGHT_CODE = (
    "deepspeed.runtime.zero",
    "torch.distributed.fsdp._flat_param",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._runtime_utils",
)


def call_shape(operator: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of the first tensor of a call; collectives take lists of tensors."""
    return shape_of(tree_leaves(list(args)) if is_collective(operator) else args)


def moves_weights(runner: str) -> bool:
    """Return whether FSDP or ZeRO calls the collective that runs now. `runner` is the module that runs regions."""
    frame: FrameType | None = sys._getframe(1)
    names: list[str] = []
    while frame is not None:
        names.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    region = takewhile(lambda name: name != runner, dropwhile(lambda name: name == runner, names))
    return any(name.startswith(_WEIGHT_CODE) for name in region)


def writes_results(operator: OpOverload) -> bool:
    """Return whether a collective writes to arguments."""
    return operator.namespace == COMMUNICATION or bool(operator._schema.is_mutable)


def is_asynchronous(operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the caller of a collective waits for it by another call; all functional ones are so."""
    if operator.namespace != COMMUNICATION:
        return True
    names = [argument.name for argument in operator._schema.arguments]
    if "async_op" not in names:
        return False
    index = names.index("async_op")
    return bool(args[index] if index < len(args) else kwargs.get("async_op", True))


def wait(result: Any) -> None:
    """Wait until what a collective makes is there."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            torch.ops._c10d_functional.wait_tensor(leaf)
        elif leaf is not None:
            torch._C._distributed_c10d.Work.unbox(leaf).wait()


def count_write(module: Module, tensors: Sequence[Tensor]) -> None:
    """Give buffers that a collective has written another version, so that regions rewind them."""
    written = {tensor.untyped_storage()._cdata for tensor in tensors}
    for buffer in module.buffers():
        if is_plain(buffer) and buffer.untyped_storage()._cdata in written:
            increment_version(buffer)


def write_again(operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Any]) -> Any:
    """Write earlier results to the arguments of a collective, and return what it would return."""
    for tensor, result in zip(written_by(operator, args, kwargs), results, strict=True):
        tensor.copy_(result)
    value = next(written_values(operator, args, kwargs), None)  # a message that is sent writes nothing
    returned = [value if "Tensor" in str(each.type) else _ended_work().boxed() for each in operator._schema.returns]
    return tuple(returned) if len(returned) > 1 else next(iter(returned), None)


@cache
def _ended_work() -> Any:
    """Return the work of a collective that has ended: one object for all, as its Python methods live no longer."""
    from torch._C._distributed_c10d import Work

    class EndedWork(Work):
        def wait(self, timeout: Any = None) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

        def get_future(self) -> torch.futures.Future[Any]:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(None)
            return future

    return EndedWork()


_FROM_ANY = "c10d::recv_any_source_"
_MESSAGES = ("c10d::send", "c10d::recv_", _FROM_ANY)


@cache
def _wraps() -> tuple[Any, ...]:
    """Return the operators that wrap the result of a functional collective, and do not wait for it."""
    found = getattr(torch.ops._c10d_functional, "_wrap_tensor_autograd", None)
    return () if found is None else (found.default,)


def is_message(operator: Any) -> bool:
    """Return whether an operator sends a message, or begins to receive one."""
    return isinstance(operator, OpOverload) and operator._schema.name in _MESSAGES


def is_in_batch(operator: Any) -> bool:
    """Return whether an operator is for one of several messages that NCCL joins in one call, with one work for all."""
    if not is_message(operator):
        return False
    from torch.distributed.distributed_c10d import _world

    return bool(_world.pg_coalesce_state)


def comes_later(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a message or a collective that begins now may come while its caller goes on."""
    return is_message(operator) or (is_collective(operator) and is_asynchronous(operator, args, kwargs))


class Arrival(NamedTuple):
    """Message or collective of a module: the operator, tensors that will have it, its work, and what stores them."""

    operator: OpOverload
    module: str
    tensors: Sequence[Tensor]
    work: Any  # of a functional collective its result
    store: Callable[[], None]


class Arrivals:
    """The messages and collectives that a region has begun. Each is stored before the first operator that reads it."""

    def __init__(self) -> None:
        self._open: list[Arrival] = []

    @property
    def are_open(self) -> bool:
        """True if any has not been stored."""
        return bool(self._open)

    def begin(self, arrival: Arrival) -> None:
        """Note a message or a collective. One that is only sent has no tensors.

        Raises
        ------
        StateError : it may come from any rank, which later runs could not return
        """
        if arrival.operator._schema.name == _FROM_ANY:
            raise StateError(
                f"module={arrival.module}: must name the rank that it receives a message from, where a rule for "
                "@collective holds. Call recv with src.",
                module=arrival.module,
            )
        if arrival.tensors:
            self._open.append(arrival)
        else:
            arrival.store()

    def read(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Store what an operator is about to read. The region has waited for its messages."""
        if not self._open or getattr(operator, "is_view", False) or operator in _wraps():
            return
        read = _storages(tree_leaves([*args, kwargs]))
        found = [each for each in self._open if not read.isdisjoint(_storages(each.tensors))]
        self._open = [each for each in self._open if each not in found]
        for each in found:
            _wait_for_collective(each)
            each.store()

    def finish(self) -> None:
        """Store what no operator has read.

        Raises
        ------
        StateError : a message has not come
        """
        arrivals, self._open = self._open, []
        for each in arrivals:
            _wait_for_collective(each)
            if is_message(each.operator):
                _check_message(each)
            each.store()


def _wait_for_collective(arrival: Arrival) -> None:
    """Wait until a collective has ended; its caller may wait again."""
    if not is_message(arrival.operator):
        wait(arrival.work)


def _check_message(message: Arrival) -> None:
    """Wait for a message, or raise an error where nothing can wait for it a second time."""
    work = torch._C._distributed_c10d.Work.unbox(message.work)
    if not any(tensor.is_cpu for tensor in message.tensors):
        work.wait()
    elif not work.is_completed():  # gloo's must not be waited for twice
        raise StateError(
            f"module={message.module}: must wait inside of its forward for the messages that it begins to "
            "receive, where a rule for @collective holds. Call wait there, or leave the rule out.",
            module=message.module,
        )


def _storages(values: Sequence[Any]) -> set[int]:
    """Return the identities of the storages of the tensors among values."""
    return {storage._cdata for value in values if isinstance(value, Tensor) for storage in storages_of(value)}
