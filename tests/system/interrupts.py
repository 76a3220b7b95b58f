"""Interrupts at each moment at which Python can raise one in the main thread.

A signal handler runs when a Python function begins, when a function written in C has returned, and when a loop goes
round. A profiler is called at the first two of these, and what it raises comes out where an interrupt would.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Collection
from dis import opname
from types import CodeType, FrameType
from typing import Any


class Moments:
    """Counts the moments that `inside` accepts, and raises KeyboardInterrupt at number `at` (None: at none)."""

    def __init__(self, inside: Callable[[FrameType], bool], at: int | None = None) -> None:
        self.count = 0
        self.where = ""
        self._inside = inside
        self._at = at

    def __enter__(self) -> Moments:
        sys.setprofile(self.look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def look(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "c_return") or not self._inside(frame):
            return
        if event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # may be its end, of which the profiler is told and where no signal handler runs
        if frame.f_code.co_filename.endswith(("weakref.py", "_weakrefset.py")):
            return  # may be the callback of a weak reference, where Python prints what is raised and goes on
        self.count += 1
        if self.count == self._at:
            sys.setprofile(None)
            code = frame.f_code
            self.where = f"{event} {getattr(arg, '__name__', '')} in {code.co_qualname}, line {frame.f_lineno}"
            raise KeyboardInterrupt


def in_package(frame: FrameType) -> bool:
    return "/actstore/" in frame.f_code.co_filename


class Instructions:
    """Counts the instructions of some functions, and raises KeyboardInterrupt before number `at` (None: before none).

    Those of a `with` line, returns and empty ones do not count: no signal handler runs between the end of a body and
    its exit, nor between the value of a return and its caller.
    """

    def __init__(self, codes: Collection[CodeType], at: int | None = None) -> None:
        self.count = 0
        self._codes = codes
        self._at = at

    def __enter__(self) -> Instructions:
        self._outer = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._outer)

    def _call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        if frame.f_code not in self._codes:
            return None
        frame.f_trace_opcodes = True
        return self._look

    def _look(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "opcode" and self._can_interrupt(frame):
            self.count += 1
            if self.count == self._at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._look

    def _can_interrupt(self, frame: FrameType) -> bool:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).strip()  # empty for those of no line
        instruction = opname[frame.f_code.co_code[frame.f_lasti]]
        return line != "" and not line.startswith("with ") and not instruction.startswith(("NOP", "RETURN"))
