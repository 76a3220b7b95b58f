"""Functions of tensors, traced and copied into a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from actstore.compiled.graph import GETITEM, name_of

NO_CHECK = "saved_tensor_with_no_vc_check"  # autograd saves such tensors after all remaining ones, without hooks
Decompositions = Mapping[Any, Callable[..., Any]] | None


def trace(function: Callable[..., Any], values: Sequence[Tensor], decompositions: Decompositions) -> GraphModule:
    """Trace a function of tensors without data, which a graph's nodes have as their values."""
    fake: Any = values[0]
    with fake.fake_mode, torch.no_grad():
        traced: GraphModule = make_fx(function, decomposition_table=decompositions)(*values)
        return traced


def splice(graph: Graph, traced: GraphModule, arguments: Sequence[Node], before: Node) -> list[Node]:
    """Copy a traced function into a graph, and return the nodes of its results."""
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), arguments, strict=True))
    with graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "output":
                return [copies[result] for result in pytree.tree_leaves(node.args[0])]
            if node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
    raise AssertionError("a graph ends with its output.")


def add_placeholder(graph: Graph, name: str, section: Node, before: Node) -> Node:
    """Add the placeholder that brings a node of the forward graph to the backward graph."""
    if before.meta.get(NO_CHECK):
        section.meta[NO_CHECK] = True
    with graph.inserting_before(before):
        node = graph.placeholder(name)
    node.meta.update({key: section.meta[key] for key in ("val", "tensor_meta", NO_CHECK) if key in section.meta})
    return node


def set_outputs(forward: Graph, outputs: list[Any], num_outputs: int) -> None:
    """Set what a forward graph returns: `num_outputs` outputs of the region, then what it saves."""
    output = forward.output_node()
    if "desc" in output.meta:
        from torch._functorch._aot_autograd import descriptors

        checked: Any = descriptors.SavedForBackwardsAOTOutput
        unchecked: Any = getattr(descriptors, "SavedForBackwardsNoVcCheckAOTOutput", checked)
        output.meta["desc"] = [
            *output.meta["desc"][:num_outputs],
            *(
                (unchecked if isinstance(node, Node) and node.meta.get(NO_CHECK) else checked)(number)
                for number, node in enumerate(outputs[num_outputs:])
            ),
        ]
    output.args = (tuple(outputs),)
    output.meta.pop("output_stack_traces", None)  # one for each output


def place_after(node: Node) -> Node:
    """Return the first node after `node` where an operator may stand: parts of one result stay close to it."""
    following = node.next
    while following.op == "placeholder" or name_of(following) == GETITEM:
        following = following.next
    return following
