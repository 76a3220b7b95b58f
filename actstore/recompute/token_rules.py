"""Operators that treat each token by itself: a run of code is followed through them.

`follow` refuses operators that mix tokens, and those that are not in its table. A sum over tokens, such as a loss, is
followed further through what is linear.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from actstore.errors import StateError

Dims = frozenset[int]  # dimensions of a tensor that hold tokens, or one of these:
SUM: Dims = frozenset([-1])  # its elements are sums over tokens: those of slices add up to those of the whole
MEAN: Dims = frozenset([-2])  # the same, of the terms of a mean
ADVICE = (
    "Leave tiles out here, or name a module or function that treats each token by itself, such as an MLP, or that "
    "returns sums over tokens or the mean of one cross_entropy"
)
_UNKNOWN = "is not known to treat each token by itself"


class MeanMode(TorchFunctionMode):
    """Mode in which a mean of cross entropies is their sum. It counts them, to divide by their number in all slices.

    Attributes
    ----------
    count : 0-d tensor, the number of terms or the sum of their weights; None for no mean

    Raises
    ------
    StateError : a second mean, or one that is not over tokens
    """

    def __init__(self, region: str, tokens: TokensMode | None = None) -> None:
        super().__init__()
        self._region = region
        self._tokens = tokens
        self.count: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        legacy = given.get("size_average"), given.get("reduce")
        if func not in (F.cross_entropy, F.nll_loss) or given.get("reduction") != "mean" or legacy != (None, None):
            return func(*args, **given)
        if self.count is not None:
            raise StateError(f"{self._region} takes the means of two cross entropies. {ADVICE}.")
        found = func(*args, **{**given, "reduction": "sum"})
        with torch.no_grad(), _disable_current_modes():
            self.count = _count(args[1], given["weight"], given["ignore_index"])
        if self._tokens is not None:
            if self._tokens.of(found) != SUM:
                raise StateError(f"{self._region} takes the mean of a cross entropy that is not over tokens. {ADVICE}.")
            self._tokens.follow(found, MEAN)
        return found


def _count(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the divisor of the mean of cross entropies."""
    if target.is_floating_point():
        return torch.tensor(target.numel() / target.shape[min(1, target.dim() - 1)], device=target.device)
    valid = target != ignore_index
    return valid.sum() if weight is None else (weight[target.where(valid, 0)] * valid).sum()


def follow(
    run: Callable[[list[Any]], Any], leaves: list[Any], places: Sequence[int | None], dim: int, region: str
) -> tuple[list[Dims], int]:
    """Follow the tokens through a run. Returns where each output has them, SUM or MEAN; and the bytes of the largest
    tensor with tokens.

    Parameters
    ----------
    places : the dimension that holds the tokens, of each leaf that has some
    dim : that of outputs, from the front or from the end

    Raises
    ------
    StateError : an operator may mix tokens, draws random numbers, or writes to a tensor of the model; or an output
        has neither tokens nor sums over them
    """
    mode = TokensMode(region)
    for leaf, place in zip(leaves, places, strict=True):
        if place is not None:
            mode.follow(leaf, frozenset([place]))
    with mode, MeanMode(region, mode):
        outputs = tree_leaves(run(leaves))
    found = [mode.of(output) for output in outputs]
    for output, dims in zip(outputs, found, strict=True):
        place = dim + output.dim() * (dim < 0) if isinstance(output, Tensor) else None
        if place not in dims and (dims not in (SUM, MEAN) or any(each not in (SUM, MEAN) for each in found)):
            which = "dimension before the last" if dim < 0 else f"dimension {dim}"
            raise StateError(
                f"{region} returns {named(output)}: its {which} must hold the tokens of its inputs, or all outputs "
                f"must be sums over them. {ADVICE}."
            )
    largest = max((tensor.nbytes for tensor, dims in mode.known.values() if any(dim >= 0 for dim in dims)), default=0)
    return found, largest


def named(value: object) -> str:
    """Return what an error calls a value."""
    return f"{type(value).__name__} of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class TokensMode(TorchDispatchMode):
    """Mode that follows the dimensions of tensors that hold tokens, and refuses what may mix them."""

    def __init__(self, region: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region
        self.known: dict[int, tuple[Tensor, Dims]] = {}  # by identity, which a tensor keeps for as long as it is here

    def follow(self, tensor: Tensor, dims: Dims) -> None:
        """Note the dimensions of a tensor; one of size 1 tells no tokens apart."""
        sizes = dict(enumerate(tensor.shape))
        self.known[id(tensor)] = tensor, frozenset(dim for dim in dims if dim < 0 or sizes.get(dim, 1) != 1)

    def of(self, value: object) -> Dims:
        """Return the dimensions that hold tokens."""
        return self.known.get(id(value), (None, frozenset[int]()))[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {each.name: each.default_value for each in func._schema.arguments if each.has_default_value()}
        given |= dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        tensors = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.refusal(func, "draws random numbers, and slices would draw others")
        dims: Dims = frozenset()
        if any(map(self.of, tensors)):
            rule = _aligned if torch.Tag.pointwise in func.tags else _RULES.get(func._schema.name[len("aten::") :])
            if {SUM, MEAN} & {*map(self.of, tensors)}:
                rule = _linear
            if rule is None:
                made = func._schema.name == "aten::empty_like"
                unknown = "makes room for what no operator computes, such as the mask of dropout" if made else _UNKNOWN
                raise self.refusal(func, unknown)
            dims = rule(self, func, given)
        for argument in func._schema.arguments:
            written = given.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write or written is None:
                continue
            if id(written) not in self.known or self.of(written) != dims:
                raise self.refusal(func, "writes to a tensor from outside of the slice")
        returned = func(*args, **(kwargs or {}))
        for output in tree_leaves(returned):
            if isinstance(output, Tensor) and id(output) not in self.known:
                self.follow(output, dims)
        return returned

    def refusal(self, func: Any, why: str = "mixes tokens") -> StateError:
        """Return the error for an operator, with the line of the model that runs it."""
        frame = sys._getframe()
        while str(frame.f_globals.get("__name__", "")).split(".")[0] in ("torch", "actstore") and frame.f_back:
            frame = frame.f_back
        return StateError(f"{self._region}: {func} {why}, at {frame.f_code.co_filename}:{frame.f_lineno}. {ADVICE}.")


Given = dict[str, Any]  # the arguments of an operator by name


def _linear(mode: TokensMode, func: Any, given: Given) -> Dims:
    """Follow sums over tokens through what is linear: sums of the same kind, factors, views and casts."""
    name, other = func._schema.name[len("aten::") :].removesuffix("_"), given.get("other")
    own = mode.of(given.get("self"))
    rounds = given.get("rounding_mode") or not getattr(given.get("dtype"), "is_floating_point", True)
    if rounds:
        raise mode.refusal(func, "rounds a sum over tokens")
    if name in ("add", "sub") and (mode.of(other) == own or (type(other) in (int, float) and other == 0)):
        return own
    if name in ("mul", "div") and not (own and mode.of(other)) and (own or name == "mul"):
        return own or mode.of(other)
    if name in ("neg", "sum", "_to_copy", "clone", "detach", "alias", "view", "squeeze", "unsqueeze") and own:
        return own
    raise mode.refusal(func, "computes with a sum over tokens, or a mean, what is not linear in it")


def _aligned(mode: TokensMode, func: Any, given: Given) -> Dims:
    """Follow an elementwise operator. A tensor without tokens has one value for all of them."""
    tensors = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
    rank = max(tensor.dim() for tensor in tensors)
    found = frozenset(dim + rank - tensor.dim() for tensor in tensors for dim in mode.of(tensor))
    for tensor in tensors:
        own = {dim + rank - tensor.dim() for dim in mode.of(tensor)}
        if any(dim >= rank - tensor.dim() and tensor.shape[dim - rank] != 1 for dim in found - own):
            raise mode.refusal(func, "reads a value for each token of a tensor that is not an input")
    return found


def _viewed(mode: TokensMode, func: Any, given: Given) -> Dims:
    """Follow a view of other sizes: all dimensions that share elements with one that holds tokens hold tokens."""
    x = given["self"]
    before, after = x.shape, func(*given.values()).shape
    if prod(before) != prod(after) or 0 in before:
        raise mode.refusal(func, _UNKNOWN)
    found, i, j = set[int](), 0, 0
    while i < len(before) or j < len(after):
        first, start = i, j
        while (i, j) == (first, start) or prod(before[first:i]) != prod(after[start:j]):
            if j == len(after) or (i < len(before) and prod(before[first:i]) <= prod(after[start:j])):
                i += 1
            else:
                j += 1
        if mode.of(x) & {*range(first, i)}:
            found |= {*range(start, j)}
    return frozenset(found)


def _reduced(mode: TokensMode, func: Any, given: Given) -> Dims:
    """Follow a reduction over some dimensions, or over all. A sum over tokens is one of all slices, too."""
    x, dim = given["self"], given.get("dim")
    over = {each % x.dim() for each in ([dim] if isinstance(dim, int) else dim or range(x.dim()))}
    if mode.of(x) and mode.of(x) <= over and func._schema.name == "aten::sum":
        return SUM
    if mode.of(x) & over:
        raise mode.refusal(func)
    return mode.of(x) if given.get("keepdim") else _without(mode.of(x), over)


def _without(dims: Dims, removed: set[int]) -> Dims:
    return frozenset(dim - sum(each < dim for each in removed) for dim in dims)


def _along(mode: TokensMode, func: Any, given: Given) -> Dims:
    """Follow an operator along one dimension that keeps the others."""
    tensors = given.get("tensors") or [each for each in (given["self"], given.get("index")) if isinstance(each, Tensor)]
    own = mode.of(tensors[0])
    if given["dim"] % tensors[0].dim() in own or any(mode.of(each) != own for each in tensors):
        raise mode.refusal(func)
    return own


def _sliced(mode: TokensMode, func: Any, given: Given) -> Dims:
    x = given["self"]
    size = x.shape[given["dim"]]
    is_whole = given["start"] in (None, 0) and (given["end"] is None or given["end"] >= size) and given["step"] == 1
    return mode.of(x) if is_whole else _along(mode, func, given)


def _selected(mode: TokensMode, func: Any, given: Given) -> Dims:
    """Follow single indices along a dimension, which the result lacks."""
    return _without(_along(mode, func, given), {given["dim"] % given["self"].dim()})


def _normalized(mode: TokensMode, func: Any, given: Given) -> Dims:
    """Follow norms over the last dimensions."""
    x = given["input"]
    others = [value for name, value in given.items() if name != "input"]
    if any(dim >= x.dim() - len(given["normalized_shape"]) for dim in mode.of(x)) or any(map(mode.of, others)):
        raise mode.refusal(func)
    return mode.of(x)


def _product(mode: TokensMode, func: Any, given: Given) -> Dims:
    """Follow matrix products: tokens are rows of the first matrix; neither the other one nor a bias has any."""
    *bias, a, b = (value for value in given.values() if isinstance(value, Tensor))
    rows = a.dim() - 2
    if mode.of(a) != {rows} or mode.of(b) or any(each.dim() > 1 or mode.of(each) for each in bias):
        raise mode.refusal(func)
    return mode.of(a)


def _permuted(mode: TokensMode, func: Any, given: Given) -> Dims:
    x = given["self"]
    marked = torch.empty([1 + (dim in mode.of(x)) for dim in range(x.dim())], device="meta")
    moved = func(marked, *[value for name, value in given.items() if name != "self"])
    return frozenset(dim for dim, size in enumerate(moved.shape) if size == 2)


def _expanded(mode: TokensMode, func: Any, given: Given) -> Dims:
    return frozenset(dim + len(given["size"]) - given["self"].dim() for dim in mode.of(given["self"]))


def _looked_up(mode: TokensMode, func: Any, given: Given) -> Dims:
    if mode.of(given["weight"]):
        raise mode.refusal(func)
    return mode.of(given["indices"])


def _entropies(mode: TokensMode, func: Any, given: Given) -> Dims:
    """Follow negative log likelihoods: each of one token, or their sum."""
    x, none, total = given["self"], 0, 2
    own, classes = mode.of(x), min(1, x.dim() - 1)
    if (
        mode.of(given["target"]) != _without(own, {classes})
        or {classes} & own
        or given["reduction"] not in (none, total)
    ):
        raise mode.refusal(func)
    return SUM if given["reduction"] == total else _without(own, {classes})


_RULES: dict[str, Callable[[TokensMode, Any, Given], Dims]] = {
    **dict.fromkeys(("_to_copy", "clone", "detach", "alias", "lift_fresh", "masked_fill", "masked_fill_"), _aligned),
    # PyTorch 2.11 does not tag these as pointwise
    **dict.fromkeys(("leaky_relu", "leaky_relu_", "elu_", "celu_", "selu_", "hardtanh_", "hardsigmoid_"), _aligned),
    **dict.fromkeys(("view", "_unsafe_view", "squeeze", "unsqueeze"), _viewed),
    **dict.fromkeys(("mm", "bmm", "addmm"), _product),
    **dict.fromkeys(
        ("mean", "sum", "max", "min", "amax", "amin", "argmax", "logsumexp", "linalg_vector_norm", "var", "std"),
        _reduced,
    ),
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "cumsum", "cat", "gather", "glu", "split", "split_with_sizes"), _along
    ),
    **dict.fromkeys(("select", "unbind"), _selected),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _normalized),
    **dict.fromkeys(("t", "transpose", "permute"), _permuted),
    "slice": _sliced,
    "expand": _expanded,
    "embedding": _looked_up,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _entropies),
}
