"""Messages and collectives of recomputed regions that come later than they begin, under a rule for `@collective`.

The region goes on meanwhile, as without the rule. What has come is stored before the first operator that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from actstore.base.storage import storages_of
from actstore.errors import StateError
from actstore.recompute.collectives import is_asynchronous, is_collective, wait

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
    """Return whether an operator is for one of several messages of which NCCL makes one call, with one work for all."""
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
