"""Names of PyTorch's operators, and of the autograd nodes that they make."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"  # name of the nodes of leaves
COPY_SLICES = "torch::autograd::CopySlices"  # of those of operators that have written to a view

# Operators whose result is the memory of their argument in another shape.
VIEWS = frozenset(
    {
        "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "expand", "permute", "select",
        "slice", "squeeze", "t", "transpose", "unfold", "unsqueeze", "view",
    }
)  # fmt: skip
# Operators whose result has the values of their argument, in another shape, memory or dtype.
PASSING = VIEWS | {
    "_conj", "_neg_view", "_to_copy", "clone", "lift_fresh", "split", "split_with_sizes", "unbind", "unsafe_split",
    "unsafe_split_with_sizes", "view_as_complex", "view_as_real",
}  # fmt: skip

_DEVICES = "CPU", "CUDA", "MPS", "XPU"  # keys of the dispatcher, for kernels
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


@cache
def aten_names() -> dict[str, bool]:
    """Return the names of PyTorch's operators, each with whether other operators make its result, on any device."""
    found: dict[str, bool] = {}
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if namespace != "aten" or overload.endswith("out"):
            continue
        composite = _has_kernel(full, "CompositeImplicitAutograd") and not any(
            _has_kernel(full, key) for key in _DEVICES
        )
        found[name] = found.get(name, True) and composite
    return found


@cache
def _by_node() -> dict[str, str]:
    """Return the names of operators by the names of their nodes, without the number at the end of those."""
    found: dict[str, str] = {}
    for name, composite in sorted(aten_names().items(), key=lambda item: (item[1], item[0].endswith("_"), item[0])):
        if not composite:
            found.setdefault(node_of(name), name.removesuffix("_"))
    return found


@cache
def _of_library(node: str) -> str:
    """Return the operator of another library that makes nodes of this name, such as ``lib.op``; empty for none."""
    if not node.startswith("GeneratedBackwardFor_"):
        return ""
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.partition(".")
        if node == f"GeneratedBackwardFor_{name.replace('::', '_')}_{overload or 'default'}Backward":
            return name.replace("::", ".")
    return ""


def operator_of_node(node: str) -> str:
    """Return the operator that makes nodes of this name, such as ``gelu`` of ``GeluBackward0``; empty for none."""
    return _by_node().get(node.rstrip("0123456789"), "")


def node_of(name: str) -> str:
    """Return the name that PyTorch's generator of code gives to the nodes of an operator."""
    words = "".join(word.title() for word in name.split("_"))
    return f"{words}Backward".replace("ForwardBackward", "Backward")


def producer_of(tensor: Tensor, most: int) -> tuple[str, int]:
    """Return the operator that has made the values of a tensor, and the number of nodes that this inspected.

    The operator is such as ``aten.gelu``, or ``library.name`` of another library. Views, copies and casts pass values
    on: it is the one before them. It is empty where the tensor has no node, or that of no operator, or where `most`
    nodes do not lead to it.
    """
    node: Any = tensor.grad_fn
    for looked in range(most):
        if node is None:
            return "", looked
        operator = operator_of_node(node.name())
        if operator not in PASSING:
            return f"aten.{operator}" if operator else _of_library(node.name()), looked + 1
        node = node.next_functions[0][0]
    return "", most
