"""Operators of PyTorch that decide, and the points at which they decide.

An operator decides where a small change of a float changes its choice: a sign, an index, a count, a branch of
Python. The table has the operators that return floats beside the choice. The result shows any other operator that
makes integers, bools or Python numbers of floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cache
from math import inf, isinf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from actstore.base.layout import layout_of


class DecisionKind(Enum):
    """Way in which an operator decides."""

    NEVER = auto()
    RELU = auto()  # lets pass the elements that are not 0 in its result
    SIDE = auto()  # backward depends on the side of one or two points that an element is on
    PEAK = auto()  # backward depends on the elements that equal the result
    INDEX = auto()  # returns values and the indices that they come from
    WHOLE = auto()  # all of its results are the choice
    DRAW = auto()  # draws zeros and ones by probabilities
    RESULT = auto()  # decides where its arguments have fractions and its result has none


class Threshold(NamedTuple):
    """Point at which an operator decides, and whether an element that equals the point is below it."""

    at: Any
    equal_is_below: bool

    def is_below(self, x: Tensor) -> Tensor:
        """Return which elements of `x` are below. NaN is not below."""
        return x.le(self.at) if self.equal_is_below else x.lt(self.at)

    def move(self, x: Tensor, below: Tensor) -> Tensor:
        """Move elements of `x` to the side that `below` has for them, to the nearest number of their dtype there."""
        low, high = self._sides(x)
        return blend(below, x.clamp_max(low), x.clamp_min(high))

    def _sides(self, x: Tensor) -> tuple[Any, Any]:
        """Return the largest number that is below, and the smallest number that is not."""
        if isinstance(self.at, Tensor):
            at = self.at.to(x.dtype)
            if self.equal_is_below:
                return at, torch.nextafter(at, torch.full_like(at, inf))
            return torch.nextafter(at, torch.full_like(at, -inf)), at
        return sides_of(float(self.at), x.dtype, self.equal_is_below)


@cache
def sides_of(at: float, dtype: torch.dtype, equal_is_below: bool) -> tuple[float, float]:
    """Return the largest number of `dtype` that is below `at`, and the smallest number that is not.

    Next to 0 they are normal numbers: a processor may flush subnormal numbers to 0.
    """
    if at == 0:
        tiny = torch.finfo(dtype).tiny
        return (0.0, tiny) if equal_is_below else (-tiny, 0.0)
    rounded = torch.tensor(at, dtype=dtype)
    before, after = (torch.nextafter(rounded, torch.tensor(end, dtype=dtype)).item() for end in (-inf, inf))
    return (rounded.item(), after) if equal_is_below else (before, rounded.item())


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def blend(mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return `one` where `mask` is true, `other` elsewhere, perhaps in the memory of `one`.

    On a CPU it is bit arithmetic: `torch.where` is several times slower on masks that a processor cannot predict.
    """
    integers = _INTEGERS.get(one.dtype.itemsize)
    if one.device.type != "cpu" or integers is None or type(one) is not Tensor or type(mask) is not Tensor:
        return torch.where(mask, one, other)
    ones = mask.view(torch.int8).neg().to(integers)
    bits, others = one.view(integers), other.view(integers)
    return bits.bitwise_xor_(others).bitwise_and_(ones).bitwise_xor_(others).view(one.dtype)


def _argument(position: int, default: float | None = None) -> Callable[[Sequence[Any]], Any]:
    def read(args: Sequence[Any]) -> Any:
        return args[position] if len(args) > position else default

    return read


_Read = Callable[[Sequence[Any]], Any]


def _fixed(at: float) -> _Read:
    return lambda _args: at


def _negated(read: _Read) -> _Read:
    return lambda args: -read(args)


def _passes_at_bound() -> bool:
    """Return whether the gradient of a clamp passes an element that equals the bound: not from PyTorch 2.14 on."""
    with torch.inference_mode(False), torch.enable_grad(), _disable_current_modes():  # such as one of fake tensors
        node: Any = torch.zeros(1, device="cpu", requires_grad=True).clamp_min(0).grad_fn
        return bool(node(torch.ones(1, device="cpu")))  # without the engine, whose threads would not survive a fork


_PASSES_AT_BOUND = _passes_at_bound()
_ZERO = _fixed(0.0)
_LAMBDA = _argument(1, 0.5)
_SIGNS = ((_ZERO, False), (_ZERO, True))
_SIDES: dict[str, tuple[tuple[_Read, bool], ...]] = {
    "threshold": ((_argument(1), True),),
    "leaky_relu": ((_ZERO, True),),
    "_prelu_kernel": ((_ZERO, True),),
    "rrelu_with_noise": ((_ZERO, True),),
    "elu": ((_ZERO, True),),  # also SELU, whose slope jumps
    "hardtanh": ((_argument(1, -1.0), True), (_argument(2, 1.0), False)),  # also ReLU6
    "hardsigmoid": ((_fixed(-3.0), True), (_fixed(3.0), False)),
    "hardswish": ((_fixed(-3.0), True), (_fixed(3.0), False)),
    "hardshrink": ((_negated(_LAMBDA), False), (_LAMBDA, True)),
    "softshrink": ((_negated(_LAMBDA), False), (_LAMBDA, True)),
    "clamp": ((_argument(1), not _PASSES_AT_BOUND), (_argument(2), _PASSES_AT_BOUND)),
    "clamp_min": ((_argument(1), not _PASSES_AT_BOUND),),
    "clamp_max": ((_argument(1), _PASSES_AT_BOUND),),
    "maximum": ((_argument(1), False),),
    "minimum": ((_argument(1), False),),
    "fmax": ((_argument(1), False),),
    "fmin": ((_argument(1), True),),
    "abs": _SIGNS,
    "sign": _SIGNS,
    "sgn": _SIGNS,
    "heaviside": _SIGNS,
}
_JUMPS = {"threshold", "hardshrink", "sign", "sgn", "heaviside"}  # the value jumps, not only the slope
_SHARES = {"maximum", "minimum"}  # two equal elements of tensors share the gradient
if not _PASSES_AT_BOUND:
    _SHARES |= {"clamp", "clamp_min", "clamp_max", "fmax", "fmin"}
_PEAKS = {"amax.default", "amin.default", "max.default", "min.default", "median.default", "nanmedian.default"}
_DIMS = {  # position of the argument `dim`; None where an index counts the last two or three dimensions as one
    "topk": 2,
    "sort": 1,
    "kthvalue": 2,
    "mode": 1,
    "median": 1,
    "nanmedian": 1,
    "max": 1,
    "min": 1,
    "cummax": 1,
    "cummin": 1,
    "max_pool2d_with_indices": None,
    "max_pool3d_with_indices": None,
    "adaptive_max_pool2d": None,
    "adaptive_max_pool3d": None,
    "fractional_max_pool2d": None,
    "fractional_max_pool3d": None,
}
_WHOLE = {"_unique2", "unique_dim", "unique_consecutive", "histc", "poisson", "binomial"}
_INDICES = {"argmax", "argmin", "nonzero", "bucketize", "searchsorted", "multinomial", "count_nonzero"}
MAKES_EMPTY = {  # the result does not depend on the values of the arguments
    "empty_like", "new_empty", "new_empty_strided", "zeros_like", "new_zeros", "ones_like", "new_ones", "full_like",
    "new_full",
}  # fmt: skip

# Functions that choose by rank, as routers do: experts for tokens, or tokens for experts.
ROUTES = {"topk", "argmax", "sort", "argsort", "multinomial"}

DISCRETE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def base_name(operator: OpOverload) -> str:
    """Return the operator's name, without the underscore of an in-place form."""
    name: str = operator._schema.name.rpartition(":")[2]
    return name.removesuffix("_") if operator._schema.is_mutable else name


@cache
def kind_of(operator: Any) -> DecisionKind:
    """Return the way in which an operator decides."""
    if not isinstance(operator, OpOverload):  # a higher-order operator
        return DecisionKind.NEVER
    name, schema = base_name(operator), operator._schema
    if operator.namespace == "aten":
        if name in MAKES_EMPTY:
            return DecisionKind.NEVER
        if name == "relu":
            return DecisionKind.RELU
        if name in _SIDES:
            return DecisionKind.SIDE
        if f"{name}.{operator._overloadname}" in _PEAKS:
            return DecisionKind.PEAK
        if name in _DIMS and len(schema.returns) == 2:
            return DecisionKind.INDEX
        if name in _WHOLE:
            return DecisionKind.WHOLE
        if name == "bernoulli" and operator._overloadname in ("default", "Tensor", "out"):
            return DecisionKind.DRAW
    if torch.Tag.nondeterministic_seeded in operator.tags and name != "multinomial":
        return DecisionKind.NEVER  # the rerun restores the generator's state
    if any(result.alias_info is not None for result in schema.returns) and not schema.is_mutable:
        return DecisionKind.NEVER  # a view
    return DecisionKind.RESULT


@cache
def routes(operator: Any) -> bool:
    """Return whether an operator chooses by rank."""
    return isinstance(operator, OpOverload) and base_name(operator) in ROUTES


def points_of(operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Threshold]:
    """Return the points at which an operator of kind SIDE decides for each element of its first argument.

    Empty where the decision affects neither forward nor backward.
    """
    name, x = base_name(operator), args[0]
    if not (x.requires_grad or name in _JUMPS):
        return []
    if name == "elu" and not _elu_jumps(args):
        return []
    if name in ("clamp", "clamp_min", "clamp_max") and kwargs:
        args = (x, kwargs.get("min", args[1] if len(args) > 1 else None), kwargs.get("max"))
    points = []
    for read, equal_is_below in _SIDES[name]:
        at = read(args)
        if at is None or (isinstance(at, int | float) and isinf(at)):
            continue
        if isinstance(at, Tensor) and torch.broadcast_shapes(at.shape, x.shape) != x.shape:
            continue
        # Kernels may round the point: an element that equals it must stay equal.
        rounds = not isinstance(at, Tensor) and x.dtype.itemsize == 2 and _is_between(float(at), x.dtype)
        if rounds or (isinstance(at, Tensor) and name in _SHARES):
            points += [Threshold(at, False), Threshold(at, True)]
        else:
            points.append(Threshold(at, equal_is_below))
    return points


@cache
def _is_between(at: float, dtype: torch.dtype) -> bool:
    """Return whether `at` is between two neighboring numbers of a dtype."""
    return bool(torch.tensor(at, dtype=dtype).item() != at)


def _elu_jumps(args: Sequence[Any]) -> bool:
    """Return whether the slope of ELU changes at 0."""
    alpha, scale, input_scale = (float(_argument(i, 1.0)(args)) for i in (1, 2, 3))
    return alpha * input_scale != 1.0 and scale != 0


def peak_of(operator: OpOverload, args: Sequence[Any], result: Tensor) -> Tensor:
    """Return the result of a reduction of kind PEAK, shaped so that it compares with the operator's argument."""
    if base_name(operator) not in ("amax", "amin") or result.dim() == args[0].dim():
        return result
    dims = _argument(1)(args) or range(args[0].dim())
    for dim in sorted(dim % args[0].dim() for dim in dims):
        result = result.unsqueeze(dim)
    return result


def give_peak(operator: OpOverload, x: Tensor, is_peak: Tensor, peak: Tensor) -> Tensor:
    """Return `x` with exactly the elements that `is_peak` marks equal to `peak`."""
    name, end = base_name(operator), torch.full_like(peak, inf)
    if name.endswith("min"):
        others = x.maximum(torch.nextafter(peak, end))
    elif name.endswith("max"):
        others = x.minimum(torch.nextafter(peak, -end))
    else:
        others = torch.where(x == peak, torch.nextafter(peak, end), x)
    return torch.where(is_peak, peak, others)


def index_bound(operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """Return an upper bound of the indices or counts in the operator's results; None where it is unknown."""
    name = base_name(operator)
    if name in _DIMS:
        x = args[0]
        if _DIMS[name] is None:
            return int(x.shape[-_pooled(name) :].numel())
        return int(x.shape[_dim_of(name, args, kwargs)]) if x.dim() else 1
    if name in _INDICES or name.startswith(("_unique", "unique")):
        return max((value.numel() for value in args if isinstance(value, Tensor)), default=None)
    return None


def values_at(operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], indices: Tensor) -> Tensor:
    """Gather the elements that an operator of kind INDEX has chosen from its first argument."""
    name, x = base_name(operator), args[0]
    values: Tensor
    if not x.dim():
        values = x.expand(indices.shape).clone()
    elif _DIMS[name] is None:
        count = _pooled(name)
        values = x.flatten(-count).gather(-1, indices.flatten(-count)).view(indices.shape)
    else:
        dim = _dim_of(name, args, kwargs)
        if indices.dim() == x.dim():
            values = x.gather(dim, indices)
        else:
            values = x.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
    if values.stride() == indices.stride():
        return values
    return torch.empty_like(indices, dtype=x.dtype).copy_(values)


def _pooled(name: str) -> int:
    return 3 if "3d" in name else 2


def _dim_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    position = _DIMS[name]
    assert position is not None
    if "dim" in kwargs:
        return int(kwargs["dim"])
    return int(_argument(position, -1)(args))


def unique_elements(x: Tensor) -> Tensor | None:
    """Return a view that has each element of `x` once, with expanded dimensions cut to one; None where they overlap."""
    if layout_of(tuple(x.shape), x.stride()).compact is None:
        return None
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x
