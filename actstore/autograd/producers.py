"""Operators that have made saved tensors, as their autograd nodes tell."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from actstore.base.operators import PASSING, operator_of_node


def operator_of(tensor: Tensor, most: int) -> tuple[str, int]:
    """Return the operator that has made the values of a tensor, and the number of nodes that this inspected.

    The operator is such as ``aten.gelu``. Views, copies and casts pass values on: it is the one before them. It is
    empty where the tensor has no node, or that of no operator of PyTorch, or where `most` nodes do not lead to it.
    """
    node: Any = tensor.grad_fn
    for looked in range(most):
        if node is None:
            return "", looked
        operator = operator_of_node(node.name())
        if operator not in PASSING:
            return operator and f"aten.{operator}", looked + 1
        node = node.next_functions[0][0]
    return "", most
