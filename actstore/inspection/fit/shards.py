"""Ranks in a dry step: the shards of FSDP2, and the weights that tensor parallelism splits.

A unit is a block that the model repeats; the rest of the model is one more. Buffers come and go as with
`torch.distributed.fsdp.fully_shard` by default: in forward the buffer of a unit stays until the next unit has its own,
backward gathers one unit ahead, and the buffer of a reduction stays until the next one.

In tensor parallelism operators work on whole tensors, and the book counts parts. A product has parts where one of its
two factors has; where both have, it sums over them and is whole. Any other output has the parts of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch._C import _current_graph_task_id
from torch.autograd import Variable
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from actstore.errors import ConfigError
from actstore.inspection.fit.memory import LiveMemory
from actstore.model.blocks import repeated_blocks


def shard_nbytes(nbytes: int, shape: Iterable[int], ranks: int) -> int:
    """Return the bytes of the largest of the shards that `ranks` have of a tensor: each has whole rows."""
    rows = next(iter(shape), 1)
    return -(-rows // ranks) * nbytes // rows if rows else nbytes


class _GatheredUnit:
    """Weights that are gathered together.

    Attributes
    ----------
    learning : the weights that get gradients
    arrived : those that have one in this backward
    whole, buffer : the gathered weights, and what the ranks have sent for them; None where they are not there
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self.learning = {id(weight) for weight in weights if weight.requires_grad}
        self.arrived: dict[int, Tensor] = {}
        self.whole: UntypedStorage | None = None
        self.buffer: UntypedStorage | None = None


class ShardedUnits:
    """The units of a model. Its weights count as shards from now on.

    Parameters
    ----------
    ranks : that have a shard of each weight
    """

    def __init__(self, model: Module, ranks: int, memory: LiveMemory) -> None:
        self._ranks, self._memory = ranks, memory
        self._units: dict[int, _GatheredUnit] = {}  # by weight
        self._ran: list[_GatheredUnit] = []  # in the order of forward
        self._sent: UntypedStorage | None = None  # of the last unit of forward
        self._reduced: UntypedStorage | None = None  # of the last reduction
        self._in_backward = False
        for module in [*map(model.get_submodule, repeated_blocks(model)), model]:
            weights = [each for each in module.parameters() if id(each) not in self._units]
            unit = _GatheredUnit(weights)
            self._units.update(dict.fromkeys(map(id, weights), unit))
            for weight in weights:
                memory.resize(weight, shard_nbytes(memory.nbytes_of(weight), weight.shape, ranks))
            module.register_forward_pre_hook(partial(self._begin_forward, unit), prepend=True)
            module.register_forward_hook(partial(self._end_forward, unit, module is model))

    def note(self, leaf: Tensor) -> None:
        """Note that a weight has its gradient. The last one of a unit reduces them all to shards."""
        unit = self._units.get(id(leaf))
        if unit is None or leaf.grad is None:
            return
        before, whole = self._memory.nbytes_of(leaf.grad), self._whole_nbytes(leaf.grad)
        if before < whole:  # the shard of an earlier backward, beside the new gradient
            self._memory.resize(leaf.grad, before + whole)
        unit.arrived[id(leaf)] = leaf
        if len(unit.arrived) == len(unit.learning):
            self._end_backward(unit)

    def _begin_forward(self, unit: _GatheredUnit, module: Module, args: Any) -> None:
        if _current_graph_task_id() == -1 and unit.whole is None:
            buffer = self._gathered(unit)
            self._sent = None
            unit.whole, self._sent = self._gathered(unit), buffer

    def _end_forward(self, unit: _GatheredUnit, is_last: bool, module: Module, args: Any, output: Any) -> None:
        if _current_graph_task_id() != -1:
            return
        self._ran.append(unit)
        if is_last:
            self._sent = None
        else:
            unit.whole = None
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(partial(self._begin_backward, unit))

    def _begin_backward(self, unit: _GatheredUnit, gradient: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end)
        if unit not in self._ran:
            return
        if unit.whole is None:
            unit.buffer = unit.buffer or self._gathered(unit)
            unit.whole = self._gathered(unit)
            unit.buffer = None
        del self._ran[self._ran.index(unit) :]
        if self._ran and self._ran[-1].whole is None:
            self._ran[-1].buffer = self._ran[-1].buffer or self._gathered(self._ran[-1])

    def _end_backward(self, unit: _GatheredUnit) -> None:
        unit.whole = self._reduced = None
        shards = []
        for leaf in unit.arrived.values():
            if leaf.grad is not None:
                nbytes = shard_nbytes(self._whole_nbytes(leaf.grad), leaf.shape, self._ranks)
                shards.append((leaf.grad, nbytes))
        self._reduced = self._empty(sum(nbytes for _, nbytes in shards) * self._ranks)
        for gradient, nbytes in shards:
            self._memory.resize(gradient, nbytes)
        unit.arrived.clear()

    def _end(self) -> None:
        """End a backward."""
        for unit in {id(unit): unit for unit in self._units.values()}.values():
            if unit.arrived:
                self._end_backward(unit)
            unit.whole = unit.buffer = None
        self._reduced, self._in_backward = None, False
        self._ran.clear()

    def _gathered(self, unit: _GatheredUnit) -> UntypedStorage | None:
        """Return memory for the weights of a unit."""
        return self._empty(sum(map(self._memory.nbytes_of, unit.weights)) * self._ranks)

    def _empty(self, nbytes: int) -> UntypedStorage | None:
        return self._memory.empty(nbytes, "gathered") if nbytes else None

    def _whole_nbytes(self, tensor: Tensor) -> int:
        return tensor.nbytes // self._memory.parts(tensor)


FACTORS = {"aten::mm": (0, 1), "aten::addmm": (1, 2)}  # positions of the two factors of a product


def split_weights(model: Module, ranks: int, memory: LiveMemory) -> None:
    """Split the weights of linear layers and of `nn.MultiheadAttention` in the blocks that a model repeats.

    Raises
    ------
    ConfigError : no block has such a layer, or the ranks do not divide one; in a step, a block returns parts
    """
    found = {}
    for block in repeated_blocks(model):
        whole = model.get_submodule(block)
        whole.register_forward_hook(partial(_check_whole, memory, ranks, block))
        for name, module in whole.named_modules(prefix=block):
            if isinstance(module, nn.Linear):
                found[name] = module.weight
            elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
                found[name] = module.in_proj_weight
    if not found:
        raise ConfigError(f"tp={ranks}: the blocks of the model must have linear layers. Use fsdp.")
    for name, weight in found.items():
        if any(width % ranks for width in weight.shape):
            shape = "x".join(map(str, weight.shape))
            raise ConfigError(f"tp={ranks}: must divide both widths of {name}, {shape}. Use a divisor.")
        memory.split(weight, ranks)


def output_parts(
    name: str, flat: list[Any], lengths: tuple[int | None, ...], memory: LiveMemory
) -> Callable[[int], int]:
    """Return a function of the position of an operator's output: how many ranks split that.

    Parameters
    ----------
    name : of the operator
    flat, lengths : its arguments, with the elements of lists among them, and the lengths of these
    """
    if not memory.is_split:
        return lambda position: 1
    found = [memory.parts(each) if isinstance(each, Tensor) else 1 for each in flat]
    most = max(found, default=1)
    if most > 1 and name in FACTORS:
        first, second = FACTORS[name]
        if (found[first] > 1) == (found[second] > 1):
            most = 1
        elif first:
            memory.split(flat[0], most)  # the bias of a layer whose output has parts
    if most == 1 or not name.startswith("aten::_foreach_"):
        return lambda position: most
    starts, at = [], 0
    for length in lengths:
        starts += [at] if length is not None else []
        at += 1 if length is None else length
    return lambda position: max(found[start + position] for start in starts)


def _check_whole(memory: LiveMemory, ranks: int, block: str, module: Module, args: Any, output: Any) -> None:
    if any(memory.parts(each) > 1 for each in tree_leaves(output) if isinstance(each, Tensor)):
        raise ConfigError(
            f"tp={ranks}: {block} must have pairs of linear layers, the second on the output of the first. Use fsdp."
        )
