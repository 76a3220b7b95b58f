"""Operators of a joint graph."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of a joint graph.

    Attributes
    ----------
    inputs : indices of the nodes that it reads
    nbytes : of the memory that it allocates; 0 for a view, and of several results only those that nothing reads
    ms : its time, without that of a loop that writes its result
    write_ms : time in which a loop writes its result; 0 for an operator outside of loops
    workspace : bytes that it needs while it runs, beside its result
    view : whether its result is memory of its first input, or several results as one value
    fused : whether the compiler runs it in a loop with the operators that make its inputs
    inlined : whether it writes nothing where all that read it are fused
    barred : whether it must not run twice, such as one that draws random numbers
    given : whether the caller brings it: an input, or a gradient
    late : whether it depends on a gradient, and so runs in backward alone
    owner : index of the node whose memory it is; its own for no view
    layout : equal for tensors that a loop may write over each other element by element; None where it may not
    movable : bytes of its elements, where the memory of its owner can wait in a tier in their place; 0 where it cannot
    encoded : bytes of a payload that may stand for its memory, with a loss; 0 where none may
    code_ms : time to make that payload, and time to decode it
    code_workspace : bytes that either needs while it runs
    """

    inputs: tuple[int, ...]
    owner: int
    nbytes: int = 0
    ms: float = 0.0
    write_ms: float = 0.0
    workspace: int = 0
    view: bool = False
    fused: bool = False
    inlined: bool = False
    barred: bool = False
    given: bool = False
    late: bool = False
    layout: Hashable = None
    movable: int = 0
    encoded: int = 0
    code_ms: float = 0.0
    code_workspace: int = 0

    @property
    def again_ms(self) -> float:
        """Time that it adds to backward where it runs again."""
        return self.ms if self.inlined else self.ms + self.write_ms
