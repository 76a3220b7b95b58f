"""Tensors that autograd saved in an inspected step."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class InspectedTensor:
    """A tensor that autograd saved.

    Attributes
    ----------
    module : name of the module that saved it; empty for one saved outside of the model
    operator : name by which Python called the operator that saved it, such as ``layer_norm`` or ``@``; may be empty
    producer : autograd node that returned it, such as ``GeluBackward0``; empty for one without a gradient
    shape, dtype, layout : of the tensor; the layout is ``dense``, ``strided`` (with gaps or overlaps) or PyTorch's name
    saved_bytes : what plain autograd holds because of it: its storage; 0 where an earlier tensor has saved that
    file, line, function : innermost line of code outside of PyTorch and actstore that led to it; empty without one
    saved_ms, freed_ms : when it was saved, and when autograd let it go; None for one that is held still
    """

    module: str
    operator: str
    producer: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    saved_bytes: int
    file: str
    line: int
    function: str
    saved_ms: float
    freed_ms: float | None

    @property
    def place(self) -> str:
        """File name and line, such as ``model.py:31``; empty where they are unknown."""
        return f"{Path(self.file).name}:{self.line}" if self.file else ""

    @property
    def code(self) -> str:
        """Text of the line; empty where the source is not there."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def made_by(self) -> str:
        """The producer without its affixes: ``gelu`` for ``GeluBackward0``; ``input`` without one."""
        return self.producer.rstrip("0123456789").removesuffix("Backward").lower() or "input"
