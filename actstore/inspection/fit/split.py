"""Tensor parallelism in a dry step: the weights that ranks split, and the parts of operators' outputs.

Operators work on whole tensors, and the book counts parts. A product has parts where one of its two factors has; where
both have, it sums over them and is whole. Any other output has the parts of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from actstore.errors import ConfigError
from actstore.inspection.fit.memory import LiveMemory
from actstore.model.blocks import repeated_blocks

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
