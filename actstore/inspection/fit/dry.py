"""A mode in which operators compute nothing: each returns memory of the right shape, which no one touches.

Rules count what some operators take beside their outputs. Their source: oneDNN copies images of several channels into a
layout of its own and back, and batch normalization makes a second gradient, as the allocator counts them under PyTorch
2.13 on x86-64.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from actstore.base.redispatch import redispatch
from actstore.errors import ConfigError
from actstore.inspection.fit.memory import Label, LiveMemory
from actstore.inspection.fit.shards import output_parts, shard_nbytes
from actstore.inspection.fit.work import OperatorWork, Work, work_of

SMALL_NBYTES = 64 * 1024  # operators on less compute, so that counters, masks and lengths have their values
LOGITS = ("aten::_log_softmax", "aten::nll_loss", "aten::_log_softmax_backward_data", "aten::nll_loss_backward")
_UNKNOWN = (
    DynamicOutputShapeException,
    DataDependentOutputException,
    UnsupportedOperatorException,
    NotImplementedError,
)
_PLAIN = (Tensor, Parameter)
_MASKS = ("aten::bernoulli_", "aten::bernoulli")  # operators that make masks of zeros and ones
_SHARING = ("aten::set_", "aten::resize_", "aten::_unsafe_view")  # whose schemas do not say that memory is shared


class _New(NamedTuple):
    """An output with memory of its own. Outputs of one `group` share it."""

    group: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Same(NamedTuple):
    """An output that is one of the arguments."""

    position: int


class _Inferred(NamedTuple):
    """The outputs of an operator for one kind of arguments, or None where it must run, and its work."""

    outputs: tuple[Any, ...] | None
    tree: Any
    small: bool
    work: OperatorWork | None = None


class _Call(NamedTuple):
    """An operator's arguments, with the elements of lists among them.

    Attributes
    ----------
    lengths : of each argument that is a list; None for one that is not
    names : of the last arguments
    """

    flat: list[Any]
    lengths: tuple[int | None, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        flat: list[Any] = []
        lengths: list[int | None] = []
        for each in (*args, *kwargs.values()):
            if isinstance(each, list | tuple):
                flat += each
                lengths.append(len(each))
            else:
                flat.append(_on_cpu(each) if isinstance(each, torch.device) else each)
                lengths.append(None)
        return cls(flat, tuple(lengths), tuple(kwargs))

    def run(self, func: Any, flat: list[Any]) -> Any:
        """Call the operator with other values."""
        values, at = [], 0
        for length in self.lengths:
            values.append(flat[at] if length is None else flat[at : at + length])
            at += 1 if length is None else length
        first = len(values) - len(self.names)
        return func(*values[:first], **dict(zip(self.names, values[first:], strict=True)))

    def key(self, func: Any) -> Hashable | None:
        """Return a key of the kind of the arguments; None where one has no value to compare."""
        parts = [
            (each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else (type(each), each)
            for each in self.flat
        ]
        key = func, tuple(parts), self.lengths, self.names
        try:
            hash(key)
        except TypeError:
            return None
        return key


class DryMode(TorchDispatchMode):
    """Mode for a step on a CPU: no operator computes, unless its tensors are small or its shapes depend on values.

    Tensors are plain ones on the CPU, of the right shape, strides and dtype, also where the step asks for "meta".
    Modules, autograd and hooks run as they always do.

    Parameters
    ----------
    work : counts the operators' work; None for no times

    Attributes
    ----------
    ranks : that have a shard of each new tensor, while an optimizer updates the shards of weights
    """

    def __init__(self, memory: LiveMemory, work: Work | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranks = 1
        self._memory = memory
        self._work = work
        self._fake = FakeTensorMode()
        self._plans: dict[Hashable, _Inferred] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # the class takes its parts out, and calls operators on these
        self._memory.running.begin(func._schema.name.partition("::")[2])
        call = _Call.of(args, kwargs or {})
        tensors = [each for each in call.flat if isinstance(each, Tensor)]
        if _runs(func) or any(each.layout is not torch.strided or each.is_quantized for each in tensors):
            return self._run(func, call)
        plan = self._plan(func, call)
        if plan.outputs is None or (plan.small and all(each.nbytes <= SMALL_NBYTES for each in tensors)):
            return self._run(func, call)
        if self._work is not None and plan.work is not None:
            self._work.operator(plan.work)
        label: Label = "logits" if func._schema.name in LOGITS else "working"
        if label == "logits" and tensors:
            self._memory.label(max(tensors, key=lambda each: each.nbytes), label)
        made: dict[int, UntypedStorage] = {}
        parts = output_parts(func._schema.name, call.flat, call.lengths, self._memory)
        outputs = [self._output(each, call.flat, made, label, parts(at)) for at, each in enumerate(plan.outputs)]
        if func._schema.name in _MASKS and outputs[0].numel():
            outputs[0].as_strided((1,), (1,)).fill_(1)  # among zeros: two values, by which a store knows a mask
        if workspace := workspace_nbytes(func, call.flat, outputs[0]):
            self._memory.empty(workspace)
        return tree_unflatten(outputs, plan.tree)

    def _run(self, func: Any, call: _Call) -> Any:
        """Run the operator, and count the memory that it makes."""
        found = call.run(lambda *args, **kwargs: redispatch(func, args, kwargs), call.flat)
        parts = output_parts(func._schema.name, call.flat, call.lengths, self._memory)
        for at, each in enumerate((found,) if isinstance(found, Tensor) else tree_leaves(found)):
            if isinstance(each, Tensor) and each.layout is torch.strided:
                nbytes = each.untyped_storage().nbytes()
                self._memory.meet(each, counted=self._counted(nbytes, each.shape, parts(at)), parts=parts(at))
        return found

    def _counted(self, nbytes: int, shape: tuple[int, ...], parts: int) -> int:
        """Return the bytes of a tensor that one rank has."""
        return shard_nbytes(-(-nbytes // parts), shape, self.ranks)

    def _plan(self, func: Any, call: _Call) -> _Inferred:
        key = call.key(func)
        plan = self._plans.get(key) if key is not None else None
        if plan is None:
            plan = self._infer(func, call)
            if key is not None:
                self._plans[key] = plan
        return plan

    def _infer(self, func: Any, call: _Call) -> _Inferred:
        """Ask the operator's own shape function."""
        fakes = [self._fake_of(each) if isinstance(each, Tensor) else each for each in call.flat]
        try:
            with self._fake:
                found = call.run(func, fakes)
        except _UNKNOWN:
            return _Inferred(None, None, small=False)
        outputs, tree = tree_flatten(found)
        groups: dict[int, int] = {}
        inferred: list[Any] = []
        for each in outputs:
            same = next((position for position, fake in enumerate(fakes) if fake is each), None)
            if not isinstance(each, Tensor):
                inferred.append(each)
            elif same is not None:
                inferred.append(_Same(same))
            else:
                storage = each.untyped_storage()
                group = groups.setdefault(storage._cdata, len(groups))
                shape, offset = tuple(each.shape), int(each.storage_offset())
                inferred.append(_New(group, storage.nbytes(), shape, each.stride(), offset, each.dtype))
        small = all(each.nbytes <= SMALL_NBYTES for each in inferred if isinstance(each, _New))
        work = None if self._work is None else work_of(func, call.run, fakes, found, outputs)
        return _Inferred(tuple(inferred), tree, small, work)

    def _fake_of(self, tensor: Tensor) -> FakeTensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(self._fake, meta, tensor.device)

    def _output(self, output: Any, flat: list[Any], made: dict[int, UntypedStorage], label: Label, parts: int) -> Any:
        if isinstance(output, _Same):
            if parts > 1:
                self._memory.split(flat[output.position], parts)
            return flat[output.position]
        if not isinstance(output, _New):
            return output
        empty: Any = torch.empty(0, dtype=output.dtype)
        if not output.nbytes:
            return empty.as_strided(output.shape, output.stride)
        storage = made.get(output.group)
        if storage is None:
            storage = made[output.group] = self._memory.empty(
                output.nbytes, label, self._counted(output.nbytes, output.shape, parts), parts
            )
        return empty.set_(storage, output.offset, output.shape, output.stride)


@cache
def _runs(func: Any) -> bool:
    """Return whether an operator must run: one that returns views, or no tensor."""
    returns = func._schema.returns
    views = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    values = bool(returns) and not any("Tensor" in str(each.type) for each in returns)
    return views or values or func._schema.name in _SHARING


def _on_cpu(device: torch.device) -> torch.device:
    """Return the CPU, in place of "meta", too.

    Raises
    ------
    ConfigError : the step asks for an accelerator
    """
    if device.type not in ("cpu", "meta"):
        raise ConfigError(
            f"device={str(device)!r}: must be cpu or meta, as a dry step needs no accelerator. Build the model and its "
            "batch on the CPU, or under torch.device('meta')."
        )
    return torch.device("cpu")


def workspace_nbytes(func: Any, flat: list[Any], made: Any) -> int:
    """Return the bytes for arguments and the first output; 0 for an operator without a rule."""
    rule = _RULES.get(func._schema.name)
    return 0 if rule is None else rule(flat, made)


def _convolution(flat: list[Any], made: Tensor) -> int:
    source, weight, _, stride = flat[:4]
    return max(source.nbytes + weight.nbytes, made.nbytes) if _is_copied(source, weight, stride) else 0


def _convolution_backward(flat: list[Any], made: Tensor | None) -> int:
    gradient, source, weight, _, stride = flat[:5]
    return source.nbytes + gradient.nbytes if _is_copied(source, weight, stride) else 0


def _batch_norm_backward(flat: list[Any], made: Tensor | None) -> int:
    source: Tensor = flat[1]
    return source.nbytes


def _is_copied(source: Tensor, weight: Tensor, stride: int) -> bool:
    """Return whether a convolution copies its source: neither one element by element, nor one of adjacent channels."""
    adjacent = source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last)
    return not adjacent and (weight.shape[2:].numel() > 1 or stride > 1)


_RULES: dict[str, Callable[[list[Any], Any], int]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::native_batch_norm_backward": _batch_norm_backward,
}
