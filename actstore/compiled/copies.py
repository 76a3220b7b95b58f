"""Copies of operators for each loop that reads them.

On a CPU Inductor writes the result of an exponential that two loops read, and then runs both as one loop. A plan lets
each of them compute it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.fx import GraphModule, Node

from actstore.compiled.formats.sizes import hinted_nbytes
from actstore.compiled.graph import VIEWS, name_of

# `should_realize_on_reuse` in torch/_inductor/ir.py
_WRITTEN = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
MAX_READERS = 8


def copy_for_readers(module: GraphModule, elementwise: Callable[[Node], bool], nbytes: int) -> None:
    """Give each reader its own copy of what is computed from an exponential, where its result has `nbytes` or more.

    Parameters
    ----------
    elementwise : whether the compiler computes an operator in the loops that read it
    """
    costly: dict[Node, None] = {}  # nodes with an exponential in their loop
    for node in module.graph.nodes:
        has_one = name_of(node) in _WRITTEN or any(source in costly for source in node.all_input_nodes)
        if has_one and (name_of(node) in VIEWS or elementwise(node)):
            costly[node] = None
    for node in reversed(costly):
        readers, value = list(node.users), node.meta.get("val")
        large = isinstance(value, Tensor) and hinted_nbytes(value) >= nbytes
        if large and 1 < len(readers) <= MAX_READERS and _is_read_in_loops(node, elementwise):
            for reader in readers[1:]:
                with module.graph.inserting_before(reader):
                    reader.replace_input_with(node, module.graph.node_copy(node))
    module.recompile()


def _is_read_in_loops(node: Node, elementwise: Callable[[Node], bool]) -> bool:
    return all(
        _is_read_in_loops(user, elementwise) if name_of(user) in VIEWS else elementwise(user) for user in node.users
    )
