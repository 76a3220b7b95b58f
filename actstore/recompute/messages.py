"""Messages between two ranks inside of recomputed regions that a rule for `@collective` names: they are sent once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from actstore.base.storage import storages_of
from actstore.errors import StateError

_FROM_ANY = "c10d::recv_any_source_"
_MESSAGES = ("c10d::send", "c10d::recv_", _FROM_ANY)


def is_message(operator: Any) -> bool:
    """Return whether an operator sends a message, or begins to receive one."""
    return isinstance(operator, OpOverload) and operator._schema.name in _MESSAGES


def is_in_batch(operator: Any) -> bool:
    """Return whether an operator is for one of several messages of which NCCL makes one call, with one work for all."""
    if not is_message(operator):
        return False
    from torch.distributed.distributed_c10d import _world

    return bool(_world.pg_coalesce_state)


class Arrival(NamedTuple):
    """A message of a module: its operator, the tensors that it is written to, its work, and what stores them."""

    operator: OpOverload
    module: str
    tensors: Sequence[Tensor]
    work: Any
    store: Callable[[], None]


class Arrivals:
    """The messages that a region has begun to receive. Each is stored before the first operator that reads it."""

    def __init__(self) -> None:
        self._open: list[Arrival] = []

    def begin(self, arrival: Arrival) -> None:
        """Note a message. One that is sent has no tensors.

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
        """Store the messages that an operator is about to read, for which the region has waited."""
        if not self._open or getattr(operator, "is_view", False):
            return
        read = _storages(tree_leaves([*args, kwargs]))
        found = [each for each in self._open if not read.isdisjoint(_storages(each.tensors))]
        self._open = [each for each in self._open if each not in found]
        for each in found:
            each.store()

    def finish(self) -> None:
        """Store the messages that no operator has read.

        Raises
        ------
        StateError : one of them has not come
        """
        arrivals, self._open = self._open, []
        for each in arrivals:
            work = torch._C._distributed_c10d.Work.unbox(each.work)
            if any(tensor.is_cpu for tensor in each.tensors):
                if not work.is_completed():  # gloo's must not be waited for twice
                    raise StateError(
                        f"module={each.module}: must wait inside of its forward for the messages that it begins to "
                        "receive, where a rule for @collective holds. Call wait there, or leave the rule out.",
                        module=each.module,
                    )
            else:
                work.wait()
            each.store()


def _storages(values: Sequence[Any]) -> set[int]:
    """Return the identities of the storages of the tensors among values."""
    return {storage._cdata for value in values if isinstance(value, Tensor) for storage in storages_of(value)}
