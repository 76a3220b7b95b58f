"""Autograd nodes whose backward decides by the sign of a saved float."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from actstore.autograd.protect import TRANSPARENT

# They save their result and let a gradient through where it is above 0.
_BY_RESULT = frozenset(
    {
        "ReluBackward0", "LeakyReluBackward1", "EluBackward1", "CeluBackward1", "RreluWithNoiseBackward1",
        "ThresholdBackward1",
    }
)  # fmt: skip
_MOST_VIEWS = 8  # of one tensor that are followed


def reads_sign(tensor: Tensor, producer: str) -> str:
    """The node that decides by the sign of `tensor`, the output of `producer`; empty where none is known to.

    A tensor without a known producer may be the result of any: it counts as one that is decided by.
    """
    node: Any = tensor.grad_fn
    for _ in range(_MOST_VIEWS):
        if producer in _BY_RESULT:
            return producer
        if producer not in TRANSPARENT:
            break
        node = node.next_functions[0][0]
        if node is None:
            break
        producer = node.name()
    return "an unknown operator" if producer in ("", "CopySlices") else ""
