"""The output of an excepted part: stored once, and given to the recomputations of the region around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_unflatten

from actstore.base.layout import layout_of, storage_view
from actstore.base.storage import storages_of, without_memory
from actstore.base.trees import flatten
from actstore.errors import StateError
from actstore.recompute.attribute_values import hidden_by_region
from actstore.recompute.running import LaterRun

_SPARE = 4  # a copy holds the gaps of a view where the span is at most this many times the elements
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, Enum, Parameter, torch.dtype, torch.device, torch.Size,
)  # fmt: skip

View = tuple[torch.Size, tuple[int, ...], int]  # shape, strides, and offset from the start of what it is a view of


class OutputPayload:
    """A tensor of an output, or the memory under several."""

    __slots__ = ("_handle", "_layout", "_requires_grad")

    def __init__(self, tensor: Tensor, leaves: Sequence[Tensor], pack: Callable[[Tensor], Any]) -> None:
        self._handle = pack(tensor)
        self._layout = tensor.shape, tensor.stride() if is_plain(tensor) else None
        self._requires_grad = any(leaf.requires_grad for leaf in leaves)

    def read(self, run: LaterRun) -> Tensor:
        """Return the tensor for a later run, in memory of its own.

        The region may write to it, also where no version tells: through ``.data``, `unsafe_chunk`, another library.
        """
        tensor: Tensor = run.parts.unpack(self._handle)
        tensor = tensor.detach()
        shape, stride = self._layout
        if self._requires_grad:
            tensor.requires_grad_()
        if stride is None:
            tensor = tensor.clone()
        elif _overlaps(shape, stride):  # no operator writes to it in place
            tensor = own_copy(tensor).requires_grad_(self._requires_grad)
        else:
            tensor = tensor.new_empty_strided(shape, stride).copy_(tensor)
        run.fixed.update(storage._cdata for storage in storages_of(tensor))
        return tensor


class OutputLeaf(NamedTuple):
    """One tensor of an output, as a later run makes it.

    Attributes
    ----------
    payload : the number of the payload; None for a tensor in the memory of an argument
    argument : the number of that argument
    view : what it is of these; None for all
    """

    payload: int | None
    argument: int
    view: View | None
    requires_grad: bool


class PartOutput:
    """The output of one call of an excepted part.

    Parameters
    ----------
    part : name of the part, for messages
    output : what it returned
    arguments : leaves of what it was given
    pack : stores a tensor exactly

    Raises
    ------
    StateError : the output holds what cannot be given to a later run
    """

    __slots__ = ("_form", "_leaves", "_part", "_payloads", "_positions", "_same")

    def __init__(self, part: str, output: Any, arguments: Sequence[Any], pack: Callable[[Tensor], Any]) -> None:
        leaves, self._form = tree_flatten(output)
        self._part = part
        self._positions: list[list[int]] = []  # of the leaves of each payload
        self._leaves: list[Any] = []
        self._same: dict[int, int] = {}
        self._payloads: list[OutputPayload | None] = []
        first: dict[int, int] = {}
        groups: dict[int, list[int]] = {}  # leaves by the storage under them
        given = {arg.untyped_storage()._cdata: i for i, arg in reversed([*enumerate(arguments)]) if is_plain(arg)}
        for i, leaf in enumerate(leaves):
            self._leaves.append(leaf)
            if isinstance(leaf, _CONSTANTS):
                continue
            _check(part, leaf)
            if first.setdefault(id(leaf), i) != i:
                self._same[i] = first[id(leaf)]
                self._leaves[i] = None
                continue
            key = leaf.untyped_storage()._cdata if is_plain(leaf) else -i - 1
            argument = given.get(key)
            arg: Any = None if argument is None else arguments[argument]
            if argument is not None and leaf.dtype is arg.dtype and leaf.requires_grad <= arg.requires_grad:
                view = None if leaf is arg else _view(leaf, int(arg.storage_offset()))
                self._leaves[i] = OutputLeaf(None, argument, view, leaf.requires_grad)
                continue
            groups.setdefault(key, []).append(i)
        for positions in groups.values():
            self._put(part, [leaves[i] for i in positions], positions, pack)

    def _put(self, part: str, leaves: list[Tensor], positions: list[int], pack: Callable[[Tensor], Any]) -> None:
        """Store the tensors over one storage."""
        number = len(self._payloads)
        self._positions.append(positions)
        if len(leaves) == 1:
            self._payloads.append(OutputPayload(leaves[0], leaves, pack))
            self._leaves[positions[0]] = OutputLeaf(number, -1, None, leaves[0].requires_grad)
            return
        if len({leaf.dtype for leaf in leaves}) > 1:
            raise StateError(
                f"part={part}: the output must not hold one memory in two dtypes. Return a copy of one of them.",
                module=part,
            )
        start = min(int(leaf.storage_offset()) for leaf in leaves)
        end = max(int(leaf.storage_offset()) + layout_of(leaf.shape, leaf.stride()).span for leaf in leaves)
        self._payloads.append(OutputPayload(storage_view(leaves[0], start, end - start), leaves, pack))
        for i, leaf in zip(positions, leaves, strict=True):
            self._leaves[i] = OutputLeaf(number, -1, _view(leaf, start), leaf.requires_grad)

    def watched(self, output: Any) -> list[list[Tensor]]:
        """Return the tensors over each payload, where there are several: the region may read some alone."""
        leaves = tree_flatten(output)[0] if len(self._payloads) > 1 else []
        return [[leaves[i] for i in positions] for positions in self._positions] if leaves else []

    def drop(self, payload: int) -> None:
        """Drop a payload that the region has not read."""
        self._payloads[payload] = None

    def rebuild(self, arguments: Sequence[Any], run: LaterRun) -> Any:
        """Return the output for a later run, whose part was given these arguments."""
        payloads = [None if payload is None else payload.read(run) for payload in self._payloads]
        leaves = list(self._leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, OutputLeaf):
                if leaf.payload is not None and payloads[leaf.payload] is None:
                    leaves[i] = hidden_by_region(self._part)
                    continue
                base: Any = arguments[leaf.argument] if leaf.payload is None else payloads[leaf.payload]
                if base.requires_grad and not leaf.requires_grad:
                    base = base.detach()
                if leaf.view is not None:
                    shape, stride, offset = leaf.view
                    base = base.as_strided(shape, stride, int(base.storage_offset()) + offset)
                leaves[i] = base
        for i, first in self._same.items():
            leaves[i] = leaves[first]
        return tree_unflatten(leaves, self._form)


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor that its storage, shape, strides and offset tell."""
    if not (type(value) is Tensor or type(value) is Parameter) or value.layout is not torch.strided:
        return False
    return not (value.is_nested or value.is_inference() or value.is_meta or value.is_conj() or value.is_neg())


def has_own_memory(result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a result consists of plain tensors in memory of their own, and of plain values."""
    leaves, _ = flatten((result,), {})
    given, _ = flatten(tuple(args), kwargs)
    if not all(is_plain(leaf) for leaf in leaves if isinstance(leaf, Tensor)):
        return False
    memory = {leaf.untyped_storage()._cdata for leaf in given if is_plain(leaf)}
    return memory.isdisjoint(leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor))


def can_wait(output: Any) -> bool:
    """Return whether an output can be given to a later run: tensors and plain values, in a tree of these."""
    return all(
        isinstance(leaf, _CONSTANTS) or (isinstance(leaf, Tensor) and not leaf.is_inference())
        for leaf in tree_flatten(output)[0]
    )


def own_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, or without the gaps where they are large. Inference mode is off for it."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return own_copy(tensor)
    if is_plain(tensor):
        layout = layout_of(tensor.shape, tensor.stride())
        if layout.dense or layout.span <= _SPARE * tensor.numel():
            start = int(tensor.storage_offset())
            return storage_view(tensor, start, layout.span).clone().as_strided(tensor.shape, tensor.stride())
    return tensor.detach().clone()


def _overlaps(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return whether several elements may share memory."""
    compact = layout_of(shape, stride).compact
    return compact is None or prod(compact[0]) < shape.numel()


def _check(part: str, leaf: Any) -> None:
    if not isinstance(leaf, Tensor):
        raise StateError(
            f"part={part}: the output must be tensors and plain values, in tuples, lists and dicts, and holds a "
            f"{type(leaf).__name__}. Register that with torch.utils._pytree.register_pytree_node, or leave the "
            f"rule for {part} out.",
            module=part,
        )
    if leaf.is_inference() or torch.is_inference_mode_enabled():  # a copy of it would be one
        raise StateError(
            f"part={part}: the output must not be an inference tensor. Run the part under torch.no_grad() instead.",
            module=part,
        )


def _view(tensor: Tensor, start: int) -> View:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()) - start


def witness_of(tensor: Tensor) -> Tensor:
    """Return what keeps the version counter and none of the memory."""
    return without_memory(tensor) if is_plain(tensor) else tensor.detach()
