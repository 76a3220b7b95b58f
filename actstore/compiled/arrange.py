"""Arrangement of the operators of a graph: a wanted order, results that are written, and copies for each reader.

On a CPU Inductor writes the result of an exponential that two loops read, and then runs both as one loop. A plan lets
each of them compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from actstore.compiled.formats.sizes import hinted_nbytes
from actstore.compiled.graph import VIEWS, name_of

IMAGE_DIM = 4
_WRITTEN = "inductor_realize_to_strides"  # in torch/_inductor/graph.py
# `should_realize_on_reuse` in torch/_inductor/ir.py
_EXPONENTIALS = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
MAX_READERS = 8


def arrange(graph: Graph, names: Sequence[str]) -> None:
    """Move the nodes of a graph into the order of `names`, each after what it reads.

    A node of another name stays before its first reader.
    """
    ranks = {name: float(rank) for rank, name in enumerate(names)}
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for node in reversed(nodes):
        if node.name not in ranks:
            ranks[node.name] = min((ranks.get(user.name, inf) for user in node.users), default=inf)
    output, waiting = graph.output_node(), set(nodes)

    def place(node: Node) -> None:
        todo = [node]
        while todo:
            missing = [source for source in todo[-1].all_input_nodes if source in waiting]
            if missing:
                todo += reversed(missing)
                continue
            last = todo.pop()
            if last in waiting:
                waiting.remove(last)
                output.prepend(last)

    for node in sorted(nodes, key=lambda node: ranks[node.name]):
        place(node)


def write_in_place(graph: Graph, names: Collection[str], nbytes: int) -> None:
    """Let Inductor write the named results at their places, where they have `nbytes` or more.

    It would write a result of a loop where an operator outside of loops reads it first. It lays out images anew, and so
    they stay as they are.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.name in names and isinstance(value, Tensor) and hinted_nbytes(value) >= nbytes:
            write(node)


def write(node: Node) -> None:
    """Let Inductor write the result of a loop, unless it is an image: loops that read it do not compute it again."""
    if node.meta["val"].dim() != IMAGE_DIM:
        node.meta[_WRITTEN] = True


def copy_for_readers(module: GraphModule, elementwise: Callable[[Node], bool], nbytes: int) -> None:
    """Give each reader its own copy of what is computed from an exponential, where its result has `nbytes` or more.

    Parameters
    ----------
    elementwise : whether the compiler computes an operator in the loops that read it
    """
    costly: dict[Node, None] = {}  # nodes with an exponential in their loop
    for node in module.graph.nodes:
        has_one = name_of(node) in _EXPONENTIALS or any(source in costly for source in node.all_input_nodes)
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
