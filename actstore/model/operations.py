"""Operations that the code of a module's forward runs: attention, a softmax, products. No step runs to find them."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator
from enum import Enum, auto
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.jit import ScriptModule
from torch.nn import Module, MultiheadAttention, Softmax

from actstore.model.blocks import has_forward


class Operation(Enum):
    ATTENTION = auto()  # one operator for all of it
    SOFTMAX = auto()
    PRODUCT = auto()  # of two activations, as a weight's is `linear`
    SCAN = auto()  # a recurrence over a sequence


_OF_NAMES = {
    **dict.fromkeys(("softmax", "masked_softmax", "Softmax"), Operation.SOFTMAX),
    **dict.fromkeys(("matmul", "bmm", "baddbmm", "einsum"), Operation.PRODUCT),
    **dict.fromkeys(
        ("scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention"), Operation.ATTENTION
    ),
}
_KERNEL = re.compile(r"(.*_)?(attn|attention)(_.*)?|.*Attention.*|.*Attn.*")
_CALLED = re.compile(r"dispatch_attention\w*|(.*_)?(attn|attention)_(.*_)?(func|fn|forward|op|interface)")
_SCAN = re.compile(r".*(scan|delta_rule|causal_conv).*", re.IGNORECASE)
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


def operations(module: Module) -> frozenset[Operation]:
    """Return the operations of a module's own forward.

    Those of its methods count, of functions that it calls, of objects in its attributes, such as a processor, and of
    modules in it without parameters. Those of its other modules do not.
    """
    walk = _CodeReader(module)
    walk.read(module)
    return frozenset(walk.found)


def is_attention(module: Module) -> bool:
    """Return whether a module's own forward runs an operator of that name, a softmax and products, or a scan."""
    found = operations(module)
    return not found.isdisjoint((Operation.ATTENTION, Operation.SCAN)) or found >= {
        Operation.SOFTMAX,
        Operation.PRODUCT,
    }


def mixes_positions(module: Module) -> bool:
    """Return whether a module, or one in it, runs attention, a product of activations, a softmax or a scan.

    True where its code cannot be read, as that of a list without a forward.
    """
    unknown = isinstance(module, ScriptModule) or not has_forward(module)
    return unknown or any(map(operations, module.modules()))


class _CodeReader:
    """Functions that are still to be read, and the operations found so far."""

    def __init__(self, root: Module) -> None:
        self._root = root
        self.found: set[Operation] = set()
        self._seen: set[Any] = set()

    def read(self, module: Module) -> None:
        if isinstance(module, MultiheadAttention):
            self.found.add(Operation.ATTENTION)
        elif isinstance(module, Softmax):
            self.found.add(Operation.SOFTMAX)
        else:
            self._function(type(module).forward, module)

    def _function(self, function: Any, owner: Any) -> None:
        function = inspect.unwrap(function)
        if not isinstance(function, FunctionType) or (key := (function.__code__, id(owner))) in self._seen:
            return
        if str(function.__module__).partition(".")[0] == "torch":
            return
        self._seen.add(key)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for instruction in _instructions(function.__code__):
            name = instruction.argval
            if instruction.opname == "BINARY_OP" and "@" in instruction.argrepr:
                self.found.add(Operation.PRODUCT)
            elif instruction.opname == "LOAD_GLOBAL":
                self._value(name, function.__globals__.get(name), owner)
            elif instruction.opname == "LOAD_DEREF" and name in cells:
                self._value(name, _content(cells[name]), owner)
            elif instruction.opname in _LOADS:
                self._attribute(name, owner, "ops" in function.__code__.co_names)

    def _attribute(self, name: str, owner: Any, is_of_library: bool) -> None:
        value = inspect.getattr_static(type(owner), name, inspect.getattr_static(type(self._root), name, None))
        if isinstance(value, FunctionType | staticmethod | classmethod):
            self._function(getattr(value, "__func__", value), owner)
        elif isinstance(owner, Module) and name in owner._modules:
            child = owner._modules[name]
            if child is not None and next(child.parameters(), None) is None:
                self.read(child)
        elif name in getattr(owner, "__dict__", ()):
            self._value(name, vars(owner)[name], owner)
        elif name in _OF_NAMES:
            self.found.add(_OF_NAMES[name])
        elif is_of_library and _KERNEL.fullmatch(name):  # torch.ops.library.attention
            self.found.add(Operation.ATTENTION)

    def _value(self, name: str, value: Any, owner: Any) -> None:
        if _SCAN.fullmatch(name):  # also where its package is not installed, and a loop stands in
            self.found.add(Operation.SCAN)
        if isinstance(value, type):
            if issubclass(value, torch.autograd.Function):
                self._kernel(name)
                self._function(value.forward, owner)
        elif name in _OF_NAMES and callable(value):
            self.found.add(_OF_NAMES[name])
        elif callable(value) and not isinstance(value, Module):
            if isinstance(value, FunctionType):
                self._function(value, owner)
                if _CALLED.fullmatch(name):
                    self._kernel(name)
                return
            self._kernel(name)
            if type(value).__module__.partition(".")[0] not in ("builtins", "torch", "functools"):
                self._function(type(value).__call__, value)

    def _kernel(self, name: str) -> None:
        if _KERNEL.fullmatch(name):
            self.found.add(Operation.ATTENTION)


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _instructions(inner)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
