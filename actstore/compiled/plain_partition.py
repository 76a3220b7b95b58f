"""Results that PyTorch's own partition of a graph saves and that of a store computes again, for the report."""

from __future__ import annotations

from collections.abc import Container, Iterable
from copy import deepcopy
from typing import Any

from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

from actstore.compiled.formats.sizes import hinted_nbytes, is_fixed
from actstore.compiled.graph import outputs_of, root_of
from actstore.compiled.names import NodeNames
from actstore.compiled.rules import ANY, GraphRules
from actstore.compiled.table import AGAIN, SavedRow, Table
from actstore.policy import Recompute

Saved = dict[str, tuple[str, int]]
"""By the name of a result, the module that it is of, and its bytes."""


def copied(joint: GraphModule) -> GraphModule:
    return GraphModule(joint, deepcopy(joint.graph))


def plain_saved(joint: GraphModule, inputs: Any, names: NodeNames, options: dict[str, Any]) -> Saved:
    """Return the results that PyTorch's partition of a copy saves. Sizes that change from run to run are left out."""
    forward, _ = min_cut_rematerialization_partition(copied(joint), inputs, **options)
    return saved_by(forward, names, options["num_fwd_outputs"])


def saved_by(forward: GraphModule, names: NodeNames, num_outputs: int) -> Saved:
    """Return the results that a forward graph saves."""
    found: Saved = {}
    for node in outputs_of(forward)[num_outputs:]:
        root = root_of(node) if isinstance(node, Node) else None
        if root is None or root.op != "call_function":
            continue
        value = root.meta.get("val")
        if isinstance(value, Tensor) and is_fixed(value):
            found[root.name] = names.of(root) or "", hinted_nbytes(value)
    return found


def is_extra(node: Node, plain: Container[str]) -> bool:
    """Return whether a graph saves a result that is not in the partition `plain`."""
    root = root_of(node)
    value = root.meta.get("val")
    known = root.op == "call_function" and isinstance(value, Tensor) and is_fixed(value)
    return known and root.name not in plain


def rows_again(plain: Saved, kept: Iterable[str], table: Table, rules: GraphRules, names: NodeNames) -> list[SavedRow]:
    """Return a row for each module with results of the partition `plain` that are not `kept`, to follow `table`."""
    sums: dict[str, list[int]] = {}
    for name in plain.keys() - set(kept):
        module, nbytes = plain[name]
        of_module = sums.setdefault(module, [0, 0])
        of_module[0] += 1
        of_module[1] += nbytes
    rows = []
    for module, (count, nbytes) in sorted(sums.items()):
        decision, _ = rules.decide(names, module, 0, ANY)
        again = decision if isinstance(decision, Recompute) else Recompute()
        name = rules.relative(module)
        number = 1 + max((row.number for row in table if row.name == name), default=-1)
        rows.append(SavedRow(AGAIN, name, number, again, saved=nbytes, tensors=count))
    return rows
