"""Arrangement of the operators of a graph in a wanted order."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from torch.fx import Graph, Node


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
