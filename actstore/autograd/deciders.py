"""Operators whose backward decides by a saved float, and the part of that float that the decision needs.

A store finds the reader of a tensor in three ways. An operator that saves its own result is the producer of that
tensor. The reader of an input is known where a function of `torch.nn.functional`, or the forward of a module of
`torch.nn`, calls the operator: the hook's caller is then its frame. An operator that a model itself calls
(``x.clamp(0)``) is known by its name in the source; such a name only ever makes a payload keep more: signs, or all
bits. A call without a name, as in ``map(torch.abs, xs)``, may decide by anything.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Set
from inspect import getattr_static, getclosurevars, unwrap
from itertools import pairwise
from math import inf
from sys import _getframe
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch import functional as torch_functional
from torch._C._autograd import _get_sequence_nr
from torch.autograd import Function
from torch.nn import functional

from actstore.autograd.protect import TRANSPARENT
from actstore.autograd.sensitive import BY_RESULT, CHOICES, COMPARISONS, DECIDE_BY_SIGN, DECIDE_BY_VALUE, POLES, SIGNS
from actstore.base.call_site import applied, applies, last_number, number_before, operator_name
from actstore.base.checkpoints import CHECKPOINTS
from actstore.base.operators import COPY_SLICES
from actstore.base.spec import Spec
from actstore.codecs import Codec
from actstore.codecs.slopes import Levels, Side

# By the name in the source, without underscores at its ends. An entry that is wrong for a call costs bytes at most.
_BY_DIVISOR = frozenset({"/", "div", "divide", "true_divide", "truediv", "idiv", "itruediv"})
_BY_EXPONENT = frozenset({"**", "pow", "ipow"})
_BY_VALUE = (DECIDE_BY_VALUE | frozenset(POLES) | {"%"}) - _BY_DIVISOR - _BY_EXPONENT
_BY_NAME = DECIDE_BY_SIGN | _BY_VALUE | _BY_DIVISOR | _BY_EXPONENT
_MAX_VIEWS = 8  # of one tensor that `_by_result` follows
_UNKNOWN = "an unknown operator"
_CHECKPOINT = "a checkpoint of the model's own"
_PACKAGE = __name__.partition(".")[0] + "."
_GRAPHS = _PACKAGE + "compiled.region"
_OPERATORS = "torch._library.autograd"  # makes a Function of each operator that a user defines
_MODELS = _PACKAGE + "bench.workloads."  # as a user's

SIGN = "sign"  # backward needs the sign: zero, positive or negative
EXACT = "exact"  # backward needs all bits

Need = str | Side | Levels


class _Guess(NamedTuple):
    """Need of a reader whose decisions nothing shows."""

    need: str


def _function(name: str) -> CodeType:
    code: CodeType = getattr(functional, name).__code__
    return code


def _forward(module: Any) -> CodeType:
    code: CodeType = module.forward.__code__
    return code


def _local(name: str) -> Callable[[FrameType], float]:
    return lambda frame: float(frame.f_locals[name])


def _shrink(frame: FrameType) -> Need:
    width = float(frame.f_locals["self"].lambd)
    return Side(-width, width, nan=False, closed=True) if width >= 0 else EXACT


def _celu(frame: FrameType) -> Need:
    alpha = _local("alpha")(frame)
    return Levels(curve="exp", rate=1 / alpha) if alpha > 0 else EXACT


# Keyed by the code that calls the operator. A Side, or Levels, is all that backward reads; the bounds of a Side may be
# in the caller's frame.
READERS: dict[CodeType, Callable[[FrameType], Need | _Guess]] = {
    _function("hardtanh"): lambda frame: Side(_local("min_val")(frame), _local("max_val")(frame)),
    _function("relu6"): lambda frame: Side(0.0, 6.0),
    _function("leaky_relu"): lambda frame: Side(0.0, inf, nan=False),
    _function("hardsigmoid"): lambda frame: Side(-3.0, 3.0, nan=False),
    _function("threshold"): lambda frame: Side(_local("threshold")(frame), inf),
    _forward(nn.Hardshrink): _shrink,
    _forward(nn.Softshrink): _shrink,
    _function("hardswish"): lambda frame: Levels(-3.0, 3.0),
    **dict.fromkeys(map(_function, ("elu", "selu")), lambda frame: Levels(curve="exp")),
    _function("celu"): _celu,
    _function("l1_loss"): lambda frame: SIGN,
    _function("rrelu"): lambda frame: "" if frame.f_locals["inplace"] else EXACT,
    _forward(nn.PReLU): lambda frame: SIGN,
    **dict.fromkeys(
        map(
            _function,
            (
                "smooth_l1_loss", "huber_loss", "hinge_embedding_loss", "margin_ranking_loss",
                "multi_margin_loss", "multilabel_margin_loss", "soft_margin_loss", "cosine_embedding_loss",
                "triplet_margin_loss", "gaussian_nll_loss", "poisson_nll_loss", "grid_sample",
            ),
        ),
        lambda frame: EXACT,
    ),
}  # fmt: skip


def caller() -> FrameType | None:
    """Find the innermost frame outside of this package."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return frame


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return bool(name.startswith(_PACKAGE)) and not name.startswith(_MODELS)


def keep_decisions(
    codec: Codec, tensor: Tensor, producer: str, *, read: bool, protected: bool, before: tuple[int, int] = (0, 0)
) -> tuple[Codec | None, str]:
    """Choose the codec of a lossy payload of `tensor`, the output of `producer`, so that backward decides as in plain.

    read : whether an operator saves it now, whose backward reads it
    protected : whether what may decide by it counts as what does: calls without a name, Functions, checkpoints
    before : sequence number, one ahead, of the last node that has saved a tensor before, and the bytes of that tensor

    Returns
    -------
    Codec : `codec`, one that keeps signs, a `Side`, or `Levels`; None where the tensor must stay exact
    str : the reason; empty where the tensor goes through `codec`
    """
    kept = codec.keeping_signs
    if kept is codec:  # lossless, or its options say it
        return codec, ""
    reader, need = _reader(tensor, before=before) if read else ("", "")
    if isinstance(need, _Guess):
        need = need.need if protected else ""
    if isinstance(need, Side):
        return codec.replaced_by(need), f"1 bit an element, all that backward of {reader} reads"
    if isinstance(need, Levels):
        spec = Spec.of(tensor)
        fitting = need.within(codec.size(spec).nbytes, spec.numel)
        if fitting is None:
            return None, f"{codec.name} has no room for what backward of {reader} reads"
        return codec.replaced_by(fitting), f"{fitting.bits} bits an element, of what backward of {reader} reads"
    if need == EXACT:
        return None, f"backward of {reader} needs all of its bits"
    decider = reader if need == SIGN else _by_result(tensor, producer)
    if not decider:
        return codec, ""
    return kept, f"{decider} decides by its sign" + ("" if kept else f", which {codec.name} loses")


# By the code that has the order of a norm as its local `p`: the needs of orders that do not need all bits.
_ORDERS: dict[CodeType, dict[Any, str]] = {
    torch_functional.norm.__code__: {None: "", "fro": "", 2: "", 1: SIGN},
    torch_functional.cdist.__code__: {2: SIGN},
}
_SMOOTH = {_function("grid_sample"): "input"}  # the local of a reader that backward only computes with


def is_reader(frame: FrameType) -> bool:
    """Return whether an operator that may decide by a float is called by `frame` now, or by its caller."""
    if _is_ours(frame):  # a hook around ours
        return (above := caller()) is not None and above is not frame and is_reader(above)
    name = operator_name(frame)
    if not name or frame.f_code in READERS or applies(frame):
        return True
    return name in _BY_NAME and not _is_smooth_power(frame, name)


def _is_smooth_power(frame: FrameType, name: str) -> bool:
    """Return whether `frame` calls a power whose slope is one of 1 or more, or a number."""
    exponent = last_number(frame) if name in _BY_EXPONENT else None
    return exponent is not None and (exponent >= 2 or exponent == 1)


def _named_reader(frame: FrameType, tensor: Tensor, *, before: tuple[int, int]) -> tuple[str, Need | _Guess]:
    """Find the operator that `frame` calls by its name, and its need of `tensor`."""
    name = operator_name(frame)
    if not name:
        return _UNKNOWN, _Guess(EXACT)
    if frame.f_code in _ORDERS and not _is_result(tensor):
        return name, _ORDERS[frame.f_code].get(frame.f_locals["p"], EXACT)
    if name in _BY_EXPONENT:
        return name, "" if _is_smooth_power(frame, name) else EXACT
    if name in _BY_DIVISOR:
        return name, "" if _is_divided_by_smaller(tensor, *before) else EXACT
    return name, EXACT if name in _BY_VALUE else SIGN if name in DECIDE_BY_SIGN else ""


def _reader(tensor: Tensor, *, before: tuple[int, int]) -> tuple[str, Need | _Guess]:
    """Find the operator that saves `tensor` now, and its need; empty if it is unknown, or if `tensor` is its result."""
    frame = caller()
    if frame is None:
        return _UNKNOWN, _Guess(EXACT)
    if frame.f_globals.get("__name__") in CHECKPOINTS:
        return _CHECKPOINT, _Guess(EXACT)
    if applies(frame):
        return ("", "") if _is_in_graph() else _function_reader(applied(frame))
    find = READERS.get(frame.f_code)
    if find is None:
        return _named_reader(frame, tensor, before=before)
    need = find(frame)
    of_input = need != EXACT and not isinstance(need, Side)  # a result lies on the side of its input
    if (of_input and _is_result(tensor)) or tensor is frame.f_locals.get(_SMOOTH.get(frame.f_code, "")):
        return "", ""
    name = frame.f_code.co_name
    return type(frame.f_locals["self"]).__name__ if name == "forward" else name, need


def _function_reader(function: type[Function] | None) -> tuple[str, _Guess]:
    """Tell the name of a Function that saves a tensor, and its need, which its code shows."""
    if function is None:
        return "a Function", _Guess(EXACT)
    if function.__module__ in CHECKPOINTS:
        return _CHECKPOINT, _Guess(EXACT)
    return function.__name__, _Guess(EXACT if chooses(function, _BY_NAME) else SIGN)


def _is_in_graph() -> bool:
    """Return whether an input of a compiled region is saved whose forward takes over the decisions of its backward."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and _is_ours(frame):
        if frame.f_globals.get("__name__") == _GRAPHS:
            return True
        frame = frame.f_back
    return False


def _is_result(tensor: Tensor) -> bool:
    """Return whether `tensor` is the result of the operator that saves it; later operators share the payload."""
    return _is_made_now(tensor) and not _is_overwritten(tensor)


def _is_divided_by_smaller(tensor: Tensor, number: int, nbytes: int) -> bool:
    """Return whether the node that saves `tensor` has saved a smaller one before: a quotient saves its divisor first.

    An element that is divided by a small one must be as exact as that. Where a divisor is for many elements, their
    errors count together, as in a norm.
    """
    return number == _get_sequence_nr() - _is_overwritten(tensor) and nbytes < tensor.nbytes


def _is_overwritten(tensor: Tensor) -> bool:
    """Return whether `tensor` is the copy of an input that the operator that saves it overwrites: a copy saves none."""
    node: Any = tensor.grad_fn
    return _is_made_now(tensor) and node.name() == "CloneBackward0"


def _is_made_now(tensor: Tensor) -> bool:
    node: Any = tensor.grad_fn
    return node is not None and node._sequence_nr() == _get_sequence_nr() - 1


def _by_result(tensor: Tensor, producer: str) -> str:
    """Find the node that decides by the sign of its result, `tensor`; empty where no node does.

    A tensor without a known producer may be the result of any node, and counts as one that a node decides by.
    """
    node: Any = tensor.grad_fn
    for _ in range(_MAX_VIEWS):
        if producer in BY_RESULT:
            return producer
        if producer not in TRANSPARENT:
            break
        node = node.next_functions[0][0]
        if node is None:
            break
        producer = node.name()
    return _UNKNOWN if producer in ("", COPY_SLICES) else ""


_MAX_DEPTH = 4  # of functions that backward calls
_MAX_CODES = 1024  # whose answers are remembered; beyond, all are forgotten
# Operators that choose or divide, or whose own derivative does, beside those whose backward does.
_CHOOSE = (
    CHOICES | COMPARISONS | SIGNS | frozenset(POLES)
    | {"//", "int", "long", "item", "tolist", "relu", "relu6", "leaky_relu", "hardswish", "hardsigmoid"}
)  # fmt: skip
_known: dict[CodeType, bool] = {}


def chooses(function: Any, deciders: Set[str]) -> bool:
    """Return whether the backward of a Function compares anything, or calls an operator that decides or divides.

    Its code shows comparisons and the operators that it calls. What a kernel of its own decides shows nowhere.

    Parameters
    ----------
    function : the class
    deciders : names of operators whose backward decides or divides
    """
    backward = _plain(getattr_static(function, "backward", None))
    if backward is not None and backward.__module__ == _OPERATORS:  # calls the backward registered for the operator
        info = getclosurevars(backward).nonlocals.get("info")
        backward = _plain(getattr(info, "_backward_fn", None)) or backward
    if backward is None:
        return False
    code = backward.__code__
    found = _known.get(code)
    if found is None:
        if len(_known) >= _MAX_CODES:
            _known.clear()
        names = deciders | _CHOOSE
        found = _known[code] = any(_chooses(each, names) for each in _codes(backward, function, _MAX_DEPTH))
    return found


def _plain(value: Any) -> FunctionType | None:
    """Return the Python function under decorators; None for anything else."""
    function = unwrap(getattr(value, "__func__", value)) if callable(getattr(value, "__func__", value)) else None
    return function if isinstance(function, FunctionType) else None


def _codes(function: FunctionType, owner: Any, depth: int) -> Iterator[CodeType]:
    """Yield the code of a function, of those inside of it, and of those of its module and its class that it names."""
    codes = [function.__code__]
    for code in codes:
        yield code
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        for name in code.co_names if depth else ():
            called = _plain(function.__globals__.get(name) or getattr_static(owner, name, None))
            if called is not None and called is not function:
                yield from _codes(called, owner, depth - 1)


def _chooses(code: CodeType, names: Set[str]) -> bool:
    if any(name.strip("_") in names for name in code.co_names):
        return True
    return any(
        each.opname == "COMPARE_OP"
        or (each.opname == "BINARY_OP" and each.argrepr.removesuffix("=") in names and not _is_smooth(before, each))
        for before, each in pairwise(dis.get_instructions(code))
    )


def _is_smooth(before: dis.Instruction, operator: dis.Instruction) -> bool:
    """Return whether an operator of Python is a quotient or a power by a number that leaves it without a pole."""
    number, name = number_before([before, operator]), operator.argrepr.removesuffix("=")
    return number is not None and ((name == "/" and number != 0) or (name == "**" and number >= 1))
