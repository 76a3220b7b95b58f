"""Operators whose backward decides by a saved float: what of it they need, and how a store knows that they read it.

Two ways lead to a reader. An operator that saves its own result is the producer of that tensor. Any other is the one
that the innermost Python frame is calling (`calls`). Where that cannot be told, the tensor stays exact. What is saved
by an `autograd.Function` is up to its author.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from sys import _getframe
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import Function

from actstore.autograd.calls import UNKNOWN, Named, named
from actstore.autograd.protect import TRANSPARENT
from actstore.base.spec import Spec
from actstore.codecs import Codec
from actstore.codecs.levels import Levels
from actstore.codecs.side import Side

# They save their result and let a gradient through where it is above 0.
_BY_RESULT = frozenset(
    {
        "ReluBackward0", "LeakyReluBackward1", "EluBackward1", "CeluBackward1", "RreluWithNoiseBackward1",
        "ThresholdBackward1",
    }
)  # fmt: skip
_MOST_VIEWS = 8  # of one tensor that are followed
_UNKNOWN = "an unknown operator"
_PACKAGE = __name__.partition(".")[0] + "."
_OPERATORS = frozenset(dir(Tensor))
# Instructions that run an operator by themselves; others may run any code.
_SYNTAX = frozenset(
    {"BINARY_SUBSCR", "STORE_SUBSCR", "BINARY_SLICE", "STORE_SLICE", "LOAD_ATTR", "STORE_ATTR", "UNARY_NEGATIVE"}
)

SIGN = "sign"  # zero, positive and negative elements stay apart
EXACT = "exact"  # bits

Need = str | Side | Levels
Argument = Callable[[int, str, Any], Any]  # by number, name and default; UNKNOWN where it cannot be told

# Names of operators, without underscores at their ends.
_BY_SIGN = frozenset(
    {
        "abs", "absolute", "l1_loss", "prelu",
        # These divide by it, or by what is made of it: a small number that comes back as zero gives infinity.
        "addcdiv", "sqrt", "log", "log2", "log10", "prod", "cumprod", "vander", "linalg_vander",
    }
)  # fmt: skip
_BY_VALUE = frozenset(
    {
        # They compare two tensors with each other.
        "max", "min", "amax", "amin", "aminmax", "median", "nanmedian", "maximum", "minimum", "fmax", "fmin",
        "scatter_reduce", "index_reduce", "segment_reduce", "pdist", "dist", "pairwise_distance", "renorm", "copysign",
        "nextafter",
        "smooth_l1_loss", "huber_loss", "hinge_embedding_loss", "margin_ranking_loss", "multi_margin_loss",
        "multilabel_margin_loss", "soft_margin_loss", "cosine_embedding_loss", "triplet_margin_loss",
        "poisson_nll_loss", "rrelu",
        # They round, or cut at numbers of their own.
        "remainder", "fmod", "%", "%=", "mod", "imod", "corrcoef",
        # Their slope has no bound: a small error crosses a pole.
        "acos", "arccos", "asin", "arcsin", "acosh", "arccosh", "atanh", "arctanh", "erfinv", "logit", "digamma",
        "psi", "polygamma", "lgamma", "gammaln", "mvlgamma", "multigammaln", "logcumsumexp",
    }
)  # fmt: skip


def _side(*bounds: Any, nan: bool = True, closed: bool = False) -> Need:
    if not all(isinstance(bound, int | float) for bound in bounds):
        return EXACT
    low, high = map(float, bounds)
    return Side(low, high, nan=nan, closed=closed) if low <= high else EXACT


def _clamp(low: Any, high: Any) -> Need:
    return _side(-inf if low is None else low, inf if high is None else high, nan=False, closed=True)


def _shrink(argument: Argument, _: Tensor) -> Need:
    width = argument(1, "lambd", 0.5)
    return EXACT if width is UNKNOWN else _side(-width, width, nan=False, closed=True)


def _celu(argument: Argument, _: Tensor) -> Need:
    alpha = argument(1, "alpha", 1.0)
    return Levels(curve="exp", rate=1 / alpha) if isinstance(alpha, int | float) and alpha > 0 else EXACT


def _power(argument: Argument, _: Tensor) -> Need:
    exponent = argument(1, "exponent", UNKNOWN)
    return "" if isinstance(exponent, int | float) and exponent >= 1 else SIGN


def _norm(argument: Argument, tensor: Tensor) -> Need:
    order = argument(1, "p", argument(1, "ord", 2))
    if order is None or order in ("fro", 2):
        return SIGN if _is_result(tensor) else ""  # whether it is zero
    return SIGN if order == 1 else EXACT


def _distance(argument: Argument, tensor: Tensor) -> Need:
    return _norm(lambda *_: argument(2, "p", 2), tensor) if argument(2, "p", 2) == 2 else EXACT


def _of_second(need: Need) -> Callable[[Argument, Tensor], Need]:
    """Need something of the second tensor, but nothing of the first where it is known to be that."""
    return lambda of, tensor: "" if tensor is of(0, "input", None) and tensor is not of(1, "other", tensor) else need


_BY_ARGUMENTS: dict[str, Callable[[Argument, Tensor], Need]] = {
    **dict.fromkeys(("/", "/=", "div", "divide", "true_divide", "truediv", "itruediv"), _of_second(SIGN)),
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), _of_second(EXACT)),
    "hardtanh": lambda of, _: _side(of(1, "min_val", -1.0), of(2, "max_val", 1.0)),
    "relu6": lambda of, _: Side(0.0, 6.0),
    "leaky_relu": lambda of, _: Side(0.0, inf, nan=False),
    "hardsigmoid": lambda of, _: Side(-3.0, 3.0, nan=False),
    "threshold": lambda of, _: _side(of(1, "threshold", UNKNOWN), inf),
    "hardshrink": _shrink,
    "softshrink": _shrink,
    "hardswish": lambda of, _: Levels(-3.0, 3.0),
    **dict.fromkeys(("elu", "selu"), lambda of, _: Levels(curve="exp")),
    "celu": _celu,
    **dict.fromkeys(("clamp", "clip"), lambda of, _: _clamp(of(1, "min", None), of(2, "max", None))),
    "clamp_min": lambda of, _: _clamp(of(1, "min", UNKNOWN), None),
    "clamp_max": lambda of, _: _clamp(None, of(1, "max", UNKNOWN)),
    **dict.fromkeys(("pow", "float_power", "**", "**="), _power),
    **dict.fromkeys(("norm", "vector_norm", "linalg_norm", "linalg_vector_norm"), _norm),
    "cdist": _distance,
}

_FUNCTION = Function.apply.__func__.__code__  # type: ignore[attr-defined]
_OVERLOADS = frozenset({OpOverload.__call__.__code__, OpOverloadPacket.__call__.__code__})


def caller() -> FrameType:
    """Find the innermost frame outside of this package."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return frame or _getframe(1)


def instruction() -> tuple[CodeType, int] | None:
    """Find what the caller is at; None where the same instruction may call an operator that needs something else."""
    frame = caller()
    found = _operator(frame)
    if found is None or not found.fixed or found.name.strip("_") in _BY_ARGUMENTS:
        return None
    return frame.f_code, frame.f_lasti


def keep_decisions(codec: Codec, tensor: Tensor, producer: str) -> tuple[Codec | None, str]:
    """Find a codec for a lossy payload of `tensor`, the output of `producer`, so that backward decides as without it.

    Returns
    -------
    Codec : `codec`, one that keeps signs, or a `Side`; None where the tensor must stay exact
    str : why; empty where it goes through `codec`
    """
    kept = codec.keeping_signs
    if kept is codec:  # lossless, or its options say it
        return codec, ""
    reader, need = _reader(caller(), tensor)
    if need == EXACT:
        return (
            None,
            f"backward of {reader} compares it" if reader else "what saves it cannot be told, and may compare it",
        )
    if isinstance(need, Side) and not _is_result(tensor):
        return codec.replaced_by(need), f"1 bit an element, all that backward of {reader} reads"
    if isinstance(need, Levels) and not _is_result(tensor):
        spec = Spec.of(tensor)
        fitting = need.within(codec.size(spec).nbytes, spec.numel)
        if fitting is None:
            return None, f"{codec.name} has no room for what backward of {reader} reads"
        return codec.replaced_by(fitting), f"{fitting.bits} bits an element, of what backward of {reader} reads"
    decider = reader if need == SIGN else _by_result(tensor, producer)
    if not decider:
        return codec, ""
    return kept, f"{decider} decides by its sign" + ("" if kept else f", which {codec.name} loses")


def _operator(frame: FrameType) -> Named | None:
    """Name the operator that `frame` is calling; None where its backward is not PyTorch's."""
    code = frame.f_code
    if code is _FUNCTION:
        return None
    found = named(frame, _OPERATORS.__contains__)
    if code in _OVERLOADS:
        called = frame.f_locals["self"]
        full: str = called._schema.name if isinstance(called, OpOverload) else called._qualified_op_name
        namespace, _, name = full.partition("::")
        return Named(name if namespace == "aten" else "", found.call, fixed=False)
    return found


def _reader(frame: FrameType, tensor: Tensor) -> tuple[str, Need]:
    """Name the operator that saves `tensor` now, with what it needs of it."""
    found = _operator(frame)
    if found is None:
        return "", ""
    name = found.name.strip("_").removeprefix("special_")
    if not name or (name.isupper() and found.name not in _SYNTAX):
        return "", EXACT
    need = _BY_ARGUMENTS.get(name)
    if need is not None:
        return name, need(partial(found.call.argument, frame), tensor)
    return name, EXACT if name in _BY_VALUE else SIGN if name in _BY_SIGN else ""


def _is_result(tensor: Tensor) -> bool:
    """Tell whether `tensor` is what the operator gives that saves it: others save it too, and share the payload.

    What an operator overwrites it clones first, after it has taken its number.
    """
    node: Any = tensor.grad_fn
    return node is not None and node._sequence_nr() == _get_sequence_nr() - 1 and node.name() != "CloneBackward0"


def _by_result(tensor: Tensor, producer: str) -> str:
    """Name the node that decides by the sign of its result, `tensor`; empty where none is known to.

    A tensor without a known producer may be the result of any: it counts as one that is decided by.
    """
    node: Any = tensor.grad_fn
    for _ in range(_MOST_VIEWS):
        if producer in _BY_RESULT:
            return producer
        if producer not in TRANSPARENT:
            break
        node = node.next_functions[0][0]
        if node is None:
            break
        producer = node.name()
    return _UNKNOWN if producer in ("", "CopySlices") else ""
