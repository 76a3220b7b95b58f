"""Arrangement of the operators of a graph in a wanted order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from torch import Tensor
from torch.fx import Graph, Node

from actstore.compiled.formats.sizes import hinted_nbytes

IMAGE_DIM = 4
_WRITTEN = "inductor_realize_to_strides"  # in torch/_inductor/graph.py


def arrange(graph: Graph, names: Sequence[str]) -> None:
    """Move the nodes of a graph into the order of `names`, each behind what it reads.

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
