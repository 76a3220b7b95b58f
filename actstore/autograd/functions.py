"""Decisions and divisions in the backward of an `autograd.Function`, read from its code.

Python shows where it compares numbers, and which operators it calls. What a kernel of its own decides shows nowhere.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Set
from inspect import getattr_static, unwrap
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

from actstore.autograd.sensitive import CHOICES, COMPARISONS, POLES, SIGNS
from actstore.base.call_site import number_before

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

    Parameters
    ----------
    function : the class
    deciders : names of operators whose backward decides or divides
    """
    backward = _plain(getattr_static(function, "backward", None))
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
