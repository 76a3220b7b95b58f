"""Calls into PyTorch, told by the instruction that a frame is at: its operator, and what it was called with.

The saved-tensor hook is called from inside of an operator, which is C++. The innermost Python frame is at the
instruction that called it: ``x.clamp(0)`` is a CALL of an attribute `clamp`. What an instruction calls is found once,
and remembered. Nothing here knows of tensors.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import CO_OPTIMIZED
from sys import getrefcount
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

ORIGINS = ["torch", "_operator"]  # modules of C functions that call nothing that they are given
_BUILTINS = "abs", "pow"  # the same of Python's own
BY_HAND = "a hook, by hand"

_C = BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
_MOST = 4096  # instructions that are remembered; beyond, all are forgotten
_CALLS = frozenset({"CALL", "CALL_KW", "PRECALL", "CALL_FUNCTION_EX"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_LOCALS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_CONST_IMMORTAL"})
_PAIRS = frozenset({"LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"})
_STORES = "STORE_FAST_LOAD_FAST"  # the end of a statement, and the begin of the next
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
_ALWAYS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})


class _Unknown:
    """What cannot be told from an instruction."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


class Constant(NamedTuple):
    """A value that stands in the code."""

    value: Any


class Path(NamedTuple):
    """A variable, and attributes of attributes of it."""

    root: str
    attributes: tuple[str, ...]
    is_global: bool


Source = Constant | Path | _Unknown
_FIELDS = MemberDescriptorType, type(Constant.value)  # of `__slots__` and of named tuples


@dataclass(frozen=True)
class Call:
    """What one instruction does.

    Attributes
    ----------
    name : of the operator; empty where it cannot be told, or only by the value that is called
    function : the value that is called, where `name` is empty
    method : whether the first tensor is not among the arguments
    positional, keywords : where the arguments come from; None where that cannot be told
    starred : where the tuple of all positional arguments comes from, where it is one
    """

    name: str = ""
    function: Source = UNKNOWN
    method: bool = False
    positional: tuple[Source, ...] | None = None
    keywords: dict[str, Source] = field(default_factory=dict)
    starred: Source = UNKNOWN

    def argument(self, frame: FrameType, position: int, keyword: str, default: Any) -> Any:
        """An argument by its number, the first tensor being 0, or by its name; UNKNOWN where it cannot be told."""
        position -= self.method
        if position < 0:
            of = self.function
            if not isinstance(of, Path) or not of.attributes:
                return UNKNOWN
            return value_of(of._replace(attributes=of.attributes[:-1]), frame)
        if self.positional is None:
            given = value_of(self.starred, frame)
            return given[position] if type(given) is tuple and position < len(given) else UNKNOWN
        if position < len(self.positional):
            return value_of(self.positional[position], frame)
        return value_of(self.keywords[keyword], frame) if keyword in self.keywords else default


class Named(NamedTuple):
    """The operator that a frame is calling; `call.name` may be empty, where `fixed` is false.

    fixed : whether this instruction always calls it
    """

    name: str
    call: Call
    fixed: bool


_known: dict[tuple[int, int], tuple[CodeType, Call]] = {}


def named(frame: FrameType, is_operator: Callable[[str], bool]) -> Named:
    """The operator that `frame` is calling, with an empty name where that cannot be told.

    is_operator : whether an attribute of this name that C code runs is an operator, whatever object has it
    """
    code, at = frame.f_code, frame.f_lasti
    found = _known.get((id(code), at))
    if found is None:
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[id(code), at] = code, _read(frame, is_operator)  # the code is held, and so its id stays its own
    call = found[1]
    if call.name:
        return Named(call.name, call, fixed=True)
    name, call = _name_of(value_of(call.function, frame), call)
    return Named(name, call, fixed=name == BY_HAND)


def _name_of(function: Any, call: Call) -> tuple[str, Call]:
    """The name of a C function, and its call as far as it is known."""
    if isinstance(function, FunctionType | MethodType):  # it has no frame: it is the hook
        return BY_HAND, call
    if isinstance(function, partial):
        return _name_of(function.func, Call())[0], Call()
    if not isinstance(function, _C):
        return "", call
    name, bound = function.__name__, getattr(function, "__self__", None)
    if isinstance(bound, ModuleType):
        origin = bound.__name__
    elif bound is None or isinstance(bound, type):
        origin = getattr(function, "__objclass__", bound or function).__module__ or ""
    else:
        origin = type(bound).__module__
        call = replace(call, method=hasattr(type(bound), name))
    return name if origin.partition(".")[0] in ORIGINS or (origin == "builtins" and name in _BUILTINS) else "", call


def value_of(source: Source, frame: FrameType) -> Any:
    """What `source` is now, as far as looking runs no code of anybody's; else UNKNOWN."""
    if isinstance(source, Constant):
        return source.value
    if isinstance(source, _Unknown):
        return UNKNOWN
    value = UNKNOWN if source.is_global else _local(frame, source.root)
    if value is UNKNOWN and source.root in frame.f_globals:
        value = frame.f_globals[source.root]
    elif value is UNKNOWN:
        value = frame.f_builtins.get(source.root, UNKNOWN)
    for name in source.attributes:
        value = _attribute(value, name)
    return value


def _local(frame: FrameType, name: str) -> Any:
    """A local variable. Before Python 3.13 the frame holds what it has shown of all of them: nobody shall."""
    shown = frame.f_locals
    value = shown.get(name, UNKNOWN)
    if frame.f_code.co_flags & CO_OPTIMIZED and type(shown) is dict and getrefcount(shown) <= 3:  # nobody else's
        shown.clear()
    return value


def _attribute(value: Any, name: str) -> Any:
    """An attribute, without running descriptors; those of C code and of classes have none that matter."""
    if isinstance(value, _Unknown):
        return UNKNOWN
    own = getattr(value, "__dict__", {})
    if name in own:
        return own[name]
    for kind in value.__mro__[1:] if isinstance(value, type) else type(value).__mro__:
        if name in kind.__dict__:
            found = kind.__dict__[name]
            if isinstance(found, staticmethod):
                return found.__func__
            if isinstance(found, _FIELDS):
                return found.__get__(value)
            return found if isinstance(found, (*_C, float, int)) else UNKNOWN
    found = getattr(value, name, UNKNOWN) if isinstance(value, type | ModuleType) else UNKNOWN
    return found if isinstance(found, (*_C, ModuleType, type)) else UNKNOWN


def _read(frame: FrameType, is_operator: Callable[[str], bool]) -> Call:
    try:
        call = _Reading(frame.f_code, frame.f_lasti).call()
    except (ValueError, IndexError, KeyError, TypeError):  # an instruction of a Python that this does not know
        return Call()
    function = call.function
    if not isinstance(function, Path):
        return call if not call.method or is_operator(call.name) else Call()
    if function.is_global:
        name, call = _name_of(value_of(function, frame), call)
        return replace(call, name=name)
    if function.attributes and is_operator(function.attributes[-1]):
        return replace(call, name=function.attributes[-1], method=True)
    return call


class _Reading:
    """The instructions of a code before one of them, with the depth of the stack before each."""

    def __init__(self, code: CodeType, at: int) -> None:
        self.code = code
        self.instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
        self.index = {i.offset: n for n, i in enumerate(self.instructions)}
        self.at = max(n for offset, n in self.index.items() if offset <= at)  # of a Python function: past its CALL
        self.targets = {i.argval for i in self.instructions if i.opcode in _JUMPS}
        self.depth = self._depths(code)

    def _depths(self, code: CodeType) -> list[int]:
        """By following every jump; -1 where nothing leads."""
        depth = [-1] * (len(self.instructions) + 1)
        entries = getattr(dis, "_parse_exception_table")(code)  # noqa: B009  (private, and its name is all that is known)
        waiting = [(0, 0), *((self.index[e.target], e.depth + e.lasti + 1) for e in entries if e.target in self.index)]
        while waiting:
            n, now = waiting.pop()
            while n < len(self.instructions) and depth[n] < 0:
                depth[n] = now
                i = self.instructions[n]
                if i.opcode in _JUMPS:
                    waiting.append((self.index[i.argval], now + _effect(i, jump=True)))
                if i.opname in _ENDS or i.opname in _ALWAYS:
                    break
                now, n = now + _effect(i, jump=False), n + 1
        return depth

    def call(self) -> Call:
        last = self.instructions[self.at]
        if last.opname not in _CALLS:
            if last.opname != "BINARY_OP":
                return Call(last.opname)
            base = self.depth[self.at] - 2
            begin = self._last(self.at - 1, base)
            operands = Call() if self._branches(begin, self.at) else self._arguments(base)
            return replace(operands, name=last.argrepr)
        extra = 2 if last.opname == "PRECALL" else 1
        base = self.depth[self.at] + _effect(last, jump=False) - extra
        begin = self._last(self.at - 1, base)
        end = self._last(self.at - 1, base + 1)  # the function is complete,
        while self.instructions[end + 1].opname in _ATTRIBUTES and self.depth[end + 1] == base + 2:
            end += 1  # or its attributes follow
        if self._branches(begin, end):
            return Call()
        call = Call()
        if not self._branches(end, self.at):
            call = self._starred(base + 2) if last.opname == "CALL_FUNCTION_EX" else self._arguments(base + 2)
        i = self.instructions[end]
        if i.opname == "PUSH_NULL" and end > begin:  # after the function, as of Python 3.13
            end -= 1
            i = self.instructions[end]
        function = self._source(end, base)
        if isinstance(function, _Unknown) and i.opname in _ATTRIBUTES:
            return replace(call, name=i.argval, method=True)
        return replace(call, function=function)

    def _last(self, n: int, depth: int) -> int:
        """The last instruction from `n` back that begins with no more than `depth` values on the stack."""
        while self.depth[n] < 0 or self.depth[n] - (self.instructions[n].opname == _STORES) > depth:
            n -= 1
            if n < 0:
                raise ValueError
        return n

    def _branches(self, begin: int, end: int) -> bool:
        """Whether there is more than one way from `begin` to `end`."""
        inside = self.instructions[begin:end]
        after = self.instructions[begin + 1 : end + 1]
        return any(i.opcode in _JUMPS for i in inside) or any(i.offset in self.targets for i in after)

    def _starred(self, base: int) -> Call:
        """With the tuple in the slot `base`, and perhaps keywords above."""
        n = self.at - 1
        if self.depth[self.at] == base + 2:
            n = self._last(n, base + 1) - 1
        return Call(starred=self._source(n, base))

    def _arguments(self, base: int) -> Call:
        """With those in the slots from `base` up."""
        n, names = self.at - 1, ()
        if self.instructions[n].opname == "PRECALL":
            n -= 1
        top = self.depth[n + 1]
        if self.instructions[self.at].opname == "CALL_KW":
            names, n, top = self.instructions[n].argval, n - 1, top - 1
        elif self.instructions[n].opname == "KW_NAMES":
            names, n = self.code.co_consts[self.instructions[n].arg or 0], n - 1
        found: list[Source] = []
        for slot in range(top - 1, base - 1, -1):
            begin = self._last(n, slot)
            found.append(self._source(n, slot))
            n = begin - 1 if self.depth[begin] == slot else begin
        found.reverse()
        count = len(found) - len(names)
        return Call(positional=tuple(found[:count]), keywords=dict(zip(names, found[count:], strict=True)))

    def _source(self, n: int, slot: int) -> Source:
        """Where the value comes from that instruction `n` leaves in a slot of the stack."""
        i = self.instructions[n]
        if i.opname in _LOCALS or i.opname in _GLOBALS:
            return Path(i.argval, (), i.opname in _GLOBALS)
        if i.opname == _STORES:
            return Path(i.argval[1], (), False)
        if i.opname in _PAIRS:
            return Path(i.argval[slot - self.depth[n]], (), False)
        if i.opname in _CONSTANTS:
            return Constant(i.argval)
        if i.opname in _ATTRIBUTES:
            of = self._source(n - 1, slot)
            return of._replace(attributes=(*of.attributes, i.argval)) if isinstance(of, Path) else UNKNOWN
        return UNKNOWN


def _effect(instruction: dis.Instruction, *, jump: bool) -> int:
    arg = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
    return dis.stack_effect(instruction.opcode, arg, jump=jump)
