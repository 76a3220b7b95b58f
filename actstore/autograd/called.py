"""Names of C functions that Python frames call: ``x.clamp(0)`` calls `clamp`, and ``x % 2`` calls `%`."""

from __future__ import annotations

import dis
import re
from itertools import takewhile
from types import CodeType, FrameType

_MAX_CALLS = 4096  # calls that are remembered; beyond, all are forgotten
_MAX_FRAMES = 8  # between a call and the `__torch_function__` that it is part of
_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX", "PRECALL"})  # the last of Python 3.11, which may call
_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"})
# They stand between the function and its call.
_BETWEEN = re.compile(r"PUSH_NULL|PRECALL|KW_NAMES|LOAD_CONST|CALL_INTRINSIC_1|(BUILD|LIST|DICT)_\w+")

_known: dict[tuple[int, int], tuple[CodeType, str]] = {}


def called_name(frame: FrameType) -> str:
    """Tell the name by which `frame` calls a function now, without underscores at its ends; empty for no known name."""
    code, at = frame.f_code, frame.f_lasti
    found = _known.get((id(code), at))
    if found is None:
        if len(_known) >= _MAX_CALLS:
            _known.clear()
        found = _known[id(code), at] = code, _read(code, at).strip("_")  # the code is held, and so its id stays its own
    return found[1]


def operator_name(frame: FrameType) -> str:
    """Tell the name by which `frame` calls a function now, or, where `frame` is part of what a class of tensors or a
    mode runs in place of a function (``__torch_function__``), the name by which that function was called.
    """
    name = called_name(frame)
    above: FrameType | None = frame
    for _ in range(0 if name else _MAX_FRAMES):
        if above is None:
            break
        at, above = above, above.f_back
        if at.f_code.co_name == "__torch_function__" and above is not None:
            return operator_name(above)
    return name


def _read(code: CodeType, at: int) -> str:
    """Find the name that is loaded where the call begins in the source; its arguments are further to the right."""
    before = list(takewhile(lambda i: i.offset <= at, dis.get_instructions(code)))
    if not before:
        return ""
    last = before.pop()
    if last.opname == "BINARY_OP":
        return last.argrepr.removesuffix("=")
    begin = _begin(last)
    if last.opname not in _CALLS or None in begin:  # Python may run without positions
        return ""
    function = next((i for i in reversed(before) if _begin(i) == begin and not _BETWEEN.fullmatch(i.opname)), last)
    return str(function.argval) if function.opname in _LOADS else ""


def _begin(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    positions = instruction.positions
    return (None, None) if positions is None else (positions.lineno, positions.col_offset)
