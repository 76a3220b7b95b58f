"""Recomputation by rule: marks on the joint graph that PyTorch's partitioner follows."""

from __future__ import annotations

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from actstore.compiled.exact import depending_on_gradients
from actstore.compiled.names import NodeNames
from actstore.compiled.rules import GraphRules


def mark_recomputed(joint: GraphModule, rules: GraphRules, names: NodeNames) -> None:
    """Mark the operators of recomputed modules. Each call of such a module is a region, whose inputs are saved."""
    if not rules.roots:
        return
    nodes = list(joint.graph.nodes)
    backward = depending_on_gradients(nodes)
    regions: dict[str, int] = {}
    for node in nodes:
        if node.op != "call_function" or node in backward or node.meta.get("partitioner_tag") == "is_backward":
            continue
        call = _region_of(node, rules, names)
        if call:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = regions.setdefault(call, len(regions) + 1)


def _region_of(node: Node, rules: GraphRules, names: NodeNames) -> str:
    """Return the identity of the recomputed call that a node belongs to; empty for none."""
    region = ""
    if not names.has_outside and _is_inside(names.base, rules.roots, rules.parts):
        region = names.base or "base"
    for call, name in names.calls(node):
        if name in rules.roots:
            region = call
        elif name in rules.parts:
            region = ""
    return region


def _is_inside(name: str, roots: frozenset[str], parts: frozenset[str]) -> bool:
    """Return whether a module, or one around it, is recomputed, and no module in between is left out."""
    inside = False
    steps = name.split(".")
    for end in range(len(steps) + 1):
        outer = ".".join(steps[:end])
        inside = outer in roots or (inside and outer not in parts)
    return inside
