"""Names of operators that Python frames call: ``x.clamp(0)`` calls `clamp`, and ``x % 2`` calls `%`."""

from __future__ import annotations

import dis
import re
from functools import cache, partial
from inspect import CO_OPTIMIZED, getattr_static
from itertools import pairwise, takewhile
from sys import version_info
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import Function
from torch.nn import functional

_MAX_CALLS = 4096  # calls that are remembered; beyond, all are forgotten
_MAX_FRAMES = 8  # between a call and the `__torch_function__` that it is part of
_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX", "PRECALL"})  # the last of Python 3.11, which may call
_VARIABLES = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_INSTRUCTIONS = {  # that call an operator, and its name
    **dict.fromkeys(("BINARY_SUBSCR", "BINARY_SLICE"), "getitem"),
    **dict.fromkeys(("STORE_SUBSCR", "STORE_SLICE"), "setitem"),
    "UNARY_NEGATIVE": "neg", "UNARY_POSITIVE": "positive", "UNARY_INVERT": "invert",
}  # fmt: skip
# They stand between the function and its call.
_BETWEEN = re.compile(r"PUSH_NULL|PRECALL|KW_NAMES|LOAD_CONST|CALL_INTRINSIC_1|(BUILD|LIST|DICT)_\w+")
_AFTER_ARGUMENTS = frozenset({"PRECALL", "KW_NAMES"})
_CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
_GROUP = re.compile("^(fft|linalg|special)_")  # before the name in the source: `torch.linalg.vector_norm`
_APPLY = "apply"  # of a Function
_APPLY_CODE: CodeType | None = getattr(Function.apply, "__code__", None)  # None from PyTorch 2.14 on: it is of C
_SUM = ("sum",)  # of Python, or of PyTorch
_POWER = torch.Tensor.__pow__.__code__  # calls the operator with its `args`
_ATEN = "torch._ops.aten"
_OPERATOR = ("_op",)  # what an object in `torch.ops` calls; it has no name of its own
_OF_C = BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
_FUNCTIONS = *_OF_C, FunctionType, GetSetDescriptorType
_OWNERS = torch, torch.Tensor, functional, torch._C._nn, torch.linalg, torch.special, torch.fft
_COPIES_LOCALS = version_info < (3, 13)  # into a dict that a frame keeps


class _CodeCall(NamedTuple):
    """A call in the source. `path` has a variable and attributes that lead to the function, where that may be any.

    `owner` leads to what has the function ``apply``. `last` is its last argument, where that is a number in the source.
    """

    code: CodeType  # held, and so its id stays its own
    name: str
    path: tuple[str, ...] = ()
    last: float | None = None
    owner: tuple[str, ...] = ()


_known: dict[tuple[int, int], _CodeCall] = {}


def operator_name(frame: FrameType) -> str:
    """Tell the name of the operator that `frame` calls now, without underscores at its ends; empty where none is known.

    It is the name in the source: ``x.clamp(0)`` calls `clamp`. Where that is the name of a variable or an attribute,
    such as ``self.activation``, it is the name of the function there. Where `frame` is part of what a class of tensors
    or a mode runs in place of a function (``__torch_function__``), it is the name by which that function was called.
    """
    _, name, path, *_ = _call_of(frame)
    if path:
        name = _name_of(_value_at(frame, path))
    if name:
        return name
    above: FrameType | None = frame
    for _ in range(_MAX_FRAMES):
        if above is None:
            break
        at, above = above, above.f_back
        if at.f_code.co_name == "__torch_function__" and above is not None:
            return operator_name(above)
    return ""


def applies(frame: FrameType) -> bool:
    """Return whether a Function runs, or saves its tensors, by a call of its `apply` in `frame`."""
    return operator_name(frame) == _APPLY if _APPLY_CODE is None else frame.f_code is _APPLY_CODE


def applied(frame: FrameType) -> type[Function] | None:
    """Return the Function of a frame that `applies`; None where its source does not tell."""
    if _APPLY_CODE is not None:
        return frame.f_locals["cls"] if frame.f_code is _APPLY_CODE else None
    call = _call_of(frame)
    path = call.owner or call.path or ("cls",) * (call.name == _APPLY)  # the last in a class with an `apply` of its own
    found = _value_at(frame, path) if path else None
    while isinstance(found, partial):
        found = found.func
    found = found.__self__ if isinstance(found, BuiltinFunctionType) else found
    return found if isinstance(found, type) and issubclass(found, Function) else None


def last_number(frame: FrameType) -> float | None:
    """Tell the number that is the last argument of what `frame` calls now; None where none is known.

    It is a number in the source, as 2 in ``x.pow(2)``, or what ``x ** n`` gives to the method of Tensor for it.
    """
    if frame.f_code is _POWER:
        (last,) = _value_at(frame, ("args",)) or (None,)
        return last if isinstance(last, int | float) else None
    call, above = _call_of(frame), frame.f_back
    if call.path and frame.f_code.co_name == "__torch_function__" and above is not None:
        return last_number(above)
    return call.last


def calls_one_operator(frame: FrameType) -> bool:
    """Return whether this place in the source calls the same operator each time."""
    call = _call_of(frame)
    return bool(call.name) and not call.path


def _call_of(frame: FrameType) -> _CodeCall:
    code, at = frame.f_code, frame.f_lasti
    found = _known.get((id(code), at))
    if found is None:
        if len(_known) >= _MAX_CALLS:
            _known.clear()
        before = list(takewhile(lambda i: i.offset <= at, dis.get_instructions(code)))
        found = _CodeCall(code, "")
        if before:
            argument = number_before(before)
            found = _read(code, before.pop(), before)._replace(last=argument)
        _known[id(code), at] = found
    return found


def number_before(until: list[dis.Instruction]) -> float | None:
    """Tell the number that is the last argument of the last instruction; None where it may be another, or no number."""
    for above, each in pairwise(reversed(until)):
        if above.is_jump_target:  # such as after ``2 if square else -0.5``
            break
        if each.opname not in _AFTER_ARGUMENTS:
            value = each.argval if each.opname in _CONSTANTS else None
            return value if isinstance(value, int | float) else None
    return None


def _read(code: CodeType, last: dis.Instruction, before: list[dis.Instruction]) -> _CodeCall:
    """Find the name that is loaded where the call begins in the source; its arguments are further to the right."""
    if last.opname == "BINARY_OP":
        return _CodeCall(code, last.argrepr.removesuffix("="))
    if last.opname in _ATTRIBUTES and _is_operator(name := str(last.argval)):  # such as `x.mT`
        return _CodeCall(code, name)
    if last.opname in _INSTRUCTIONS:
        return _CodeCall(code, _INSTRUCTIONS[last.opname])
    begin = _begin(last)
    if last.opname not in _CALLS or None in begin:  # Python may run without positions
        return _CodeCall(code, "")
    loads = [i for i in before if _begin(i) == begin and not _BETWEEN.fullmatch(i.opname)]
    if not loads or loads[-1].opname not in _VARIABLES | _ATTRIBUTES:
        return _CodeCall(code, "")
    name, path = str(loads[-1].argval).strip("_"), tuple(str(load.argval) for load in loads)
    is_path = loads[0].opname in _VARIABLES and all(load.opname in _ATTRIBUTES for load in loads[1:])
    if _is_operator(name) and path != _SUM:
        return _CodeCall(code, name, owner=path[:-1] if is_path and name == _APPLY else ())
    if not is_path:
        return _CodeCall(code, "")
    return _CodeCall(code, name, path[:-1] if path[1:] == _OPERATOR else path)


def _begin(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    positions = instruction.positions
    return (None, None) if positions is None else (positions.lineno, positions.col_offset)


@cache
def _is_operator(name: str) -> bool:
    """Return whether PyTorch has an operator, or a property of tensors, of a name without underscores at its ends."""
    full = {f"{before}{name}{after}" for before in ("", "_", "__") for after in ("", "_", "__")}
    found = [getattr(each, name, None) for name in full - set(dir(object)) for each in _OWNERS]
    return name == _APPLY or any(isinstance(each, _FUNCTIONS) for each in found)


def _value_at(frame: FrameType, path: tuple[str, ...]) -> Any:
    """Return what is at a path now, without running code of its owner; None where nothing is found."""
    name, names = path[0], frame.f_locals
    value = next((each[name] for each in (names, frame.f_globals, frame.f_builtins) if name in each), None)
    if _COPIES_LOCALS and frame.f_code.co_flags & CO_OPTIMIZED:
        names.clear()  # it would hold tensors as long as the function runs
    for name in path[1:]:
        value = getattr_static(value, name, None)
        value = getattr(value, "__func__", value) if isinstance(value, staticmethod) else value
    return value


def _name_of(function: Any) -> str:
    """Return the name of an operator of PyTorch, without its group; empty for any other value."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, OpOverload | OpOverloadPacket):
        name, is_known = str(function.__name__).partition(".")[0], str(function.__module__) == _ATEN
    elif isinstance(function, _OF_C) and function is not sum:  # which calls operators of what it sums, such as a `map`
        name = function.__name__
        is_known = _is_operator(name.strip("_")) or str(function.__module__).startswith("torch.")
    else:
        return ""
    return _GROUP.sub("", name.strip("_")) if is_known else ""
