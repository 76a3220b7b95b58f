"""Lines of Python that saved a tensor: the operator's call, and the line of the user's code that led to it."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from actstore.autograd.deciders import caller
from actstore.base.called import operator_name

_TORCH = Path(torch.__file__).parent
_OURS = Path(__file__).parents[1]
_STANDARD = Path(sysconfig.get_path("stdlib"))
_SITE = ("site-packages", "dist-packages")


class CodeLine(NamedTuple):
    """The operator that saves a tensor, and where the user's code called it.

    Attributes
    ----------
    operator : the name by which Python calls it, such as ``layer_norm`` or ``@``; empty where that is not known
    file, line, function : of the innermost frame outside of PyTorch, actstore and Python's library; empty without one
    """

    operator: str
    file: str
    line: int
    function: str


def current_line() -> CodeLine:
    """Return the line that runs now, for a saved-tensor hook."""
    frame = caller()
    operator = "" if frame is None else operator_name(frame)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return CodeLine(operator, "", 0, "")
    return CodeLine(operator, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@cache
def _is_users(file: str) -> bool:
    """Return whether a file is neither PyTorch's nor actstore's nor one of Python's library."""
    path = Path(file)
    if path.is_relative_to(_TORCH) or path.is_relative_to(_OURS):
        return False
    standard = path.is_relative_to(_STANDARD) and not any(part in _SITE for part in path.parts)
    return not standard and not file.startswith("<frozen")
