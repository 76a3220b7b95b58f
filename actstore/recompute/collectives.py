"""Collectives inside of recomputed regions that a rule for `@collective` names: later runs do not communicate.

Functional ones (`_c10d_functional`) return tensors, as other operators do. Those of `torch.distributed` (`c10d`) write
to their arguments: a later run gets copies of what they wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from itertools import dropwhile, takewhile
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from actstore.recompute.inner_rules import COMMUNICATION, name_of, written_by, written_values
from actstore.recompute.modes import shape_of
from actstore.recompute.outputs import is_plain

# Their collectives move weights, on streams of their own and for modules that run later.
_WEIGHT_CODE = (
    "deepspeed.runtime.zero",
    "torch.distributed.fsdp._flat_param",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._runtime_utils",
)


@cache
def is_collective(operator: Any) -> bool:
    """Return whether a rule for `@collective` is for an operator."""
    return bool(name_of(operator)) and operator.namespace != "aten"


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
