"""Tensors that must not be encoded with loss, and tensors that are not activations."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Sequence, Set
from math import prod
from sys import _getframe
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from actstore.autograd.sensitive import EXACT_PRODUCERS
from actstore.base.storage import storages_of
from actstore.codecs.base import LOSSY_DTYPES

# Nodes that view or cast a tensor: the output is still the parameter.
TRANSPARENT = frozenset(
    {
        "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ReshapeAliasBackward0",
        "UnsafeViewBackward0", "ExpandBackward0", "SliceBackward0", "SelectBackward0", "UnsqueezeBackward0",
        "SqueezeBackward0", "SqueezeBackward1", "AliasBackward0", "ToCopyBackward0", "CloneBackward0",
        "SplitBackward0", "SplitWithSizesBackward0", "AsStridedBackward0",
    }
)  # fmt: skip

# MAX_NODES_INSPECTED bounds the nodes that Python inspects in one forward. PyTorch frees a chain of nodes in a loop,
# but inspected nodes by recursion: 40,000 overflow a stack of 8 MiB (PyTorch 2.13, also without a store).
_STACK_NBYTES, _NODE_NBYTES = 8 * 2**20, 512
_soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
MAX_NODES_INSPECTED = (_STACK_NBYTES if _soft == resource.RLIM_INFINITY else min(_soft, _STACK_NBYTES)) // _NODE_NBYTES

WITHOUT_GRADIENT = "requires no gradient: a statistic, a mask or an index"
STATISTIC = "a statistic: one element for many"
MIN_REDUCED, MAX_STEPS = 8, 6  # elements for each one of a statistic; operators between these and the statistic
PARAMETER = "a view or a cast of a parameter"
COMPUTED = "a weight that is computed from parameters"  # a reason why the tensors that a call saves must be exact
# The same for a compiled region, whose saved tensors have no graph of their own.
COMPILED = "saved by a compiled region, which does not tell activations from statistics and masks"


def lossy_reason(tensor: Tensor, dtype: torch.dtype, producer: str) -> str:
    """Return the reason why `tensor`, the output of the node `producer`, must come back exactly, or an empty text.

    Exact are integers and bools, float64 and complex, and tensors that require no gradient (norm statistics, logsumexp,
    masks, noise). So are the outputs of softmax, log-softmax and other producers whose error training amplifies, what
    is reduced over a dimension, and what an operator returns beside a far larger result.
    """
    if dtype not in LOSSY_DTYPES:
        return f"{str(dtype).removeprefix('torch.')} is never lossy"
    if not (producer or tensor.requires_grad):
        return WITHOUT_GRADIENT
    if "Norm" in producer and tensor.output_nr:
        return "a statistic of a normalization"
    if producer in EXACT_PRODUCERS:
        return f"output of {producer.rstrip('01').removesuffix('Backward')}: its error is amplified"
    is_statistic = _is_beside(tensor) or is_reduced(tensor.shape, tensor.stride(), _shapes_before(tensor))
    return STATISTIC if is_statistic else ""


def _is_beside(tensor: Tensor) -> bool:
    """Return whether an operator returns a tensor beside one of more dimensions, as attention kernels logsumexp."""
    first = getattr(tensor.grad_fn, "_input_metadata", ())[:1] if tensor.output_nr else ()
    if not first or first[0].is_nested_tensor:
        return False
    shape = first[0].shape
    return tensor.dim() < len(shape) and prod(shape) >= MIN_REDUCED * tensor.numel()


def is_reduced(shape: Sequence[int], stride: Sequence[int], sources: Iterable[Sequence[int]]) -> bool:
    """Return whether a tensor has one element where one of its `sources` has many, beside the first dimension.

    sources : shapes of what it is computed from, read one by one
    """
    one = [size if step else 1 for size, step in zip(shape, stride, strict=True)]  # where it is expanded, too
    return may_be_reduced(shape, stride) and any(
        len(source) == len(one)
        and all(size in (of_source, 1) for size, of_source in zip(one, source, strict=True))
        and prod(source) >= MIN_REDUCED * prod(one)
        for source in sources
    )


def may_be_reduced(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a tensor has a dimension of one element, beside the first."""
    return 1 in shape[1:] or 0 in stride[1:]


def _shapes_before(tensor: Tensor) -> Iterator[Sequence[int]]:
    """Yield the shapes of what the nodes before a tensor have computed, from one node to the next."""
    node: Any = tensor.grad_fn
    for _ in range(MAX_STEPS if node is not None else 0):
        node, number = next((edge for edge in node.next_functions if edge[0] is not None), (None, 0))
        found = getattr(node, "_input_metadata", ())  # of its backward
        if number >= len(found) or found[number].is_nested_tensor:
            return
        yield found[number].shape


def is_cast_parameter(tensor: Tensor, parameters: Set[int]) -> bool:
    """Return whether `tensor` is a view or a cast copy of a parameter, as autocast makes one for each layer.

    `parameters` are the storages of parameters that are plain tensors, as for `functional_call`.
    """
    node = tensor.grad_fn
    while node is not None and node.name() in TRANSPARENT:
        node = node.next_functions[0][0]
        if node is not None and node.name() == "torch::autograd::AccumulateGrad":
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Parameter):
                return True
            return leaf is not None and any(storage._cdata in parameters for storage in storages_of(leaf))
    return False


_HOOKS = WeightNorm, SpectralNorm  # of `torch.nn.utils`, which compute a weight before each call of its module
_COMPUTING: frozenset[CodeType] = frozenset(hook.compute_weight.__code__ for hook in _HOOKS)
_MAX_FRAMES = 8  # between such a hook and the hook that saves a tensor


def is_of_weight_hook(module: Module | None, storage: int) -> bool:
    """Return whether a hook of `module` has computed the saved tensor of a storage as a weight, or does so now."""
    hooks = () if module is None else [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _HOOKS)]
    for hook in hooks:
        weight = vars(module).get(hook.name)
        if isinstance(weight, Tensor) and any(each._cdata == storage for each in storages_of(weight)):
            return True
    frame: FrameType | None = _getframe(1)
    for _ in range(_MAX_FRAMES if hooks else 0):
        if frame is not None and frame.f_code in _COMPUTING:
            return True
        frame = frame and frame.f_back
    return False
